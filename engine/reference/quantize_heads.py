"""NumPy mirror of `engine.kernels.quantize_heads`: its specification."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

__all__ = ["quantize_heads"]

Array = np.ndarray[Any, Any]

_LARGEST = np.float32(448)  # largest finite e4m3
_NAN = np.uint8(0x7F)  # e4m3 code; the kernel writes it for a negative NaN, too


def quantize_heads(
    x: Array, *, offset: Array | None = None, rotate: bool = False
) -> tuple[Array, Array]:
    """codes = e4m3(y / scale), scale = max |y| / 448 per head; y = (x - offset) H / sqrt(D).

    NaN keeps its own code and does not affect the scale. Codes saturate, since rounding a tiny
    scale may push values beyond 448.
    """
    y = x.astype(np.float32)
    if offset is not None:
        y = y - offset
    if rotate:
        y = y @ _hadamard(x.shape[-1]) * np.float32(x.shape[-1] ** -0.5)
    peak = np.fmax.reduce(np.abs(y), axis=(0, 2), initial=0).astype(np.float32)
    scale = np.where(peak == 0, np.float32(1), peak / _LARGEST)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = y / scale[:, None]
    codes = np.clip(ratio, -_LARGEST, _LARGEST).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return np.where(np.isnan(ratio), _NAN, codes), scale


def _hadamard(n: int) -> Array:
    h = np.ones((1, 1), np.float32)
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    return h
