"""Keys and values in pages of 8 bits: e4m3 codes with a scale for each key/value head."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

__all__ = ["from_codes", "to_codes"]

Array = np.ndarray[Any, Any]

_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_LARGEST = np.float32(448)  # largest finite e4m3
_NAN = np.uint8(0x7F)


def to_codes(x: Array, scale: Array) -> Array:
    """Return x (T, K, D) as codes: x / scale, saturated, rounded to nearest even; NaN stays NaN."""
    y = np.asarray(x, np.float32) / scale[:, None]
    codes: Array = np.clip(y, -_LARGEST, _LARGEST).astype(_E4M3).view(np.uint8)
    codes[np.isnan(y)] = _NAN  # of either sign
    return codes


def from_codes(codes: Array, scale: Array) -> Array:
    """Return codes (K, ..., D) as float32: code * scale of the head."""
    values: Array = codes.view(_E4M3).astype(np.float32)
    values *= scale.reshape(-1, *(1,) * (codes.ndim - 1))
    return values
