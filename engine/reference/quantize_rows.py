"""NumPy mirror of `engine.kernels.quantize_rows`: its specification."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

__all__ = ["quantize_rows"]

Array = np.ndarray[Any, Any]

_LARGEST = {"fp8": np.float32(448), "int8": np.float32(127)}


def quantize_rows(x: Array, *, dtype: str = "fp8", group: int = 0) -> tuple[Array, Array]:
    """codes = round(x * (largest / peak)), scales = peak / largest; peak = max |x| of the group.

    Products and quotients are single float32 operations. The factor largest / peak is clamped to
    the largest float32, so that groups of zeros have codes 0 and scale 0. A NaN makes its group's
    scale NaN.
    """
    (m, k) = x.shape
    largest = _LARGEST[dtype]
    width = group or max(k, 1)
    groups = max(1, -(-k // width))
    padded = np.zeros((m, groups * width), np.float32)
    padded[:, :k] = x
    padded = padded.reshape(m, groups, width)
    peak = np.max(np.abs(padded), axis=2, initial=0)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        factor = np.fmin(largest / peak, np.finfo(np.float32).max)
        values = np.clip(padded * factor[:, :, None], -largest, largest)
        scales = peak / largest
    values = values.reshape(m, groups * width)[:, :k]
    if dtype == "int8":
        return np.rint(np.nan_to_num(values)).astype(np.int8), scales
    codes = values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return np.where(np.isnan(values), np.uint8(0x7F), codes), scales
