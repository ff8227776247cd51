"""A product whose bits depend on nothing but a row of x and a row of the weight."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["multiply_row_by_row"]

Array = np.ndarray[Any, Any]

_TOGETHER = 4  # outputs that BLAS computes in one pass; the rest it sums in another order


def multiply_row_by_row(x: Array, matrix: Array) -> Array:
    """Multiply each row of x (T, K) by the matrix (K, N) separately, both float32.

    In one product BLAS's order of summation varies by row. It also varies in the last outputs of a
    product whose number of outputs is no multiple of four: they get zeros beside them.
    """
    count = matrix.shape[1]
    rows = x[:, None, :]
    whole = count // _TOGETHER * _TOGETHER
    y = np.empty((len(x), count), np.float32)
    y[:, :whole] = np.matmul(rows, matrix[:, :whole])[:, 0]
    if whole < count:
        last = np.zeros((_TOGETHER, len(matrix)), np.float32)
        last[: count - whole] = matrix[:, whole:].T
        y[:, whole:] = np.matmul(rows, last.T)[:, 0, : count - whole]
    return y
