"""Quantized keys and values: one-byte codes with one scale per key/value head.

uint8 arrays hold e4m3 codes, int8 arrays integers from -127 to 127.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

__all__ = ["dequantize_kv", "quantize_kv"]

Array = np.ndarray[Any, Any]

_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_LARGEST_E4M3 = np.float32(448)
_LARGEST_INT8 = np.float32(127)
_NAN = np.uint8(0x7F)


def quantize_kv(x: Array, scale: Array, dtype: Any) -> Array:
    """Return codes of `dtype` for x (T, K, D): x / scale, rounded to nearest even, saturated.

    NaN stays NaN in e4m3 and becomes 0 in int8.
    """
    y = np.asarray(x, np.float32) / scale[:, None]
    if dtype == np.int8:
        whole = np.clip(np.rint(y), -_LARGEST_INT8, _LARGEST_INT8)
        return np.where(np.isnan(y), np.float32(0), whole).astype(np.int8)
    codes: Array = np.clip(y, -_LARGEST_E4M3, _LARGEST_E4M3).astype(_E4M3).view(np.uint8)
    codes[np.isnan(y)] = _NAN  # NaN of either sign
    return codes


def dequantize_kv(codes: Array, scale: Array) -> Array:
    """Return the float32 values of codes (K, ..., D): code * the head's scale."""
    numbers = codes if codes.dtype == np.int8 else codes.view(_E4M3)
    values: Array = numbers.astype(np.float32)
    values *= scale.reshape(-1, *(1,) * (codes.ndim - 1))
    return values
