"""Row-by-row GEMM: each result depends bitwise on one row of x and one weight row alone."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["multiply_row_by_row"]

Array = np.ndarray[Any, Any]

_TOGETHER = 4  # outputs per BLAS pass; a remainder is summed in another order


def multiply_row_by_row(x: Array, matrix: Array) -> Array:
    """Multiply each row of x (T, K) by the matrix (K, N) separately, of the same dtype.

    In a single GEMM, BLAS's order of summation varies by row. It also differs for the last outputs
    if their number is not a multiple of four, so the matrix is padded with zeros.
    """
    count = matrix.shape[1]
    rows = x[:, None, :]
    whole = count // _TOGETHER * _TOGETHER
    y = np.empty((len(x), count), x.dtype)
    y[:, :whole] = np.matmul(rows, matrix[:, :whole])[:, 0]
    if whole < count:
        last = np.zeros((_TOGETHER, len(matrix)), x.dtype)
        last[: count - whole] = matrix[:, whole:].T
        y[:, whole:] = np.matmul(rows, last.T)[:, 0, : count - whole]
    return y
