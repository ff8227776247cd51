"""NumPy mirror of `engine.kernels.head_gemm`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.dtypes import accumulation_dtype
from engine.reference._row_by_row import multiply_row_by_row

__all__ = ["head_gemm"]

Array = np.ndarray[Any, Any]


def head_gemm(x: Array, weight: Array) -> Array:
    """out[t, h] = weight[h] x[t, h], summed in float32 and rounded once."""
    real = accumulation_dtype(x.dtype)
    result = np.empty((*x.shape[:2], weight.shape[1]), x.dtype)
    for head, matrix in enumerate(weight.astype(real)):
        # Row by row: BLAS's order of summation depends on the number of tokens.
        result[:, head] = multiply_row_by_row(x[:, head].astype(real), matrix.T)
    return result
