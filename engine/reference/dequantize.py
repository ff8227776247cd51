"""NumPy mirror of `engine.kernels.dequantize`: its specification."""

from __future__ import annotations

from typing import Any

from engine.dtypes import np_dtype
from engine.weights import Weight, unpack_weight

__all__ = ["dequantize"]


def dequantize(weight: Weight, dtype: str) -> Any:
    """Return the dequantized weight (N, K), computed in float32 and rounded once."""
    return unpack_weight(weight).astype(np_dtype(dtype), copy=False)
