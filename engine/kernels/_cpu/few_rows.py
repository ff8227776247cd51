"""Skinny products, a large dense matrix times a few vectors, faster than BLAS.

They are limited by reading the matrix once. BLAS first copies the matrix to a layout that pays off
with many vectors, and its threads synchronise. For blocks of few matrix rows BLAS skips the copy,
which saves about a third of the time. The blocks depend on the shapes alone, so the bits do not
depend on the number of threads.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from engine.kernels._cpu import team
from engine.kernels._cpu.features import cpu_features

__all__ = ["multiply_few_rows", "pays"]

Array = np.ndarray[Any, Any]

_MAX_ROWS = 16  # maximum rows of x; beyond, one large product is faster
_MIN_SIZE = 1 << 18  # minimum elements of the matrix
_BLOCK_PRODUCTS = 400_000  # multiply-adds per block; from about 2**19, OpenBLAS copies the matrix
_MAX_BLOCK = 96  # maximum matrix rows per block
_PIECE_SIZE = 1 << 17  # elements of the matrix per piece of work


def pays(x: Array, matrix: Array) -> bool:
    """Tell whether `multiply_few_rows` is faster for x (T, N) and the matrix (M, N)."""
    return (
        1 < len(x) <= _MAX_ROWS
        and x.dtype == matrix.dtype == np.float32
        and matrix.size >= _MIN_SIZE
        and matrix.flags.c_contiguous
        and "AVX512_SKX" in cpu_features()  # OpenBLAS's AVX-512 kernels skip the copy
    )


def multiply_few_rows(x: Array, matrix: Array) -> Array:
    """Return x Wᵀ, (T, M) float32, for x (T, N) and the matrix W (M, N), both float32."""
    rows, columns = matrix.shape
    block = max(8, min(_MAX_BLOCK, _BLOCK_PRODUCTS // (len(x) * columns)))
    step = block * max(1, _PIECE_SIZE // (block * columns))
    out = np.empty((rows, len(x)), np.float32)
    parts = [slice(start, start + step) for start in range(0, rows, step)]
    team.run([partial(_multiply_blocks, matrix[part], x.T, out[part], block) for part in parts])
    return np.ascontiguousarray(out.T)


def _multiply_blocks(matrix: Array, x: Array, out: Array, block: int) -> None:
    """Multiply `block` rows of the matrix at a time; the last block may be smaller."""
    whole = len(matrix) // block * block
    blocks = matrix[:whole].reshape(-1, block, matrix.shape[1])
    np.matmul(blocks, x, out=out[:whole].reshape(-1, block, x.shape[1]))
    if whole < len(matrix):
        np.matmul(matrix[whole:], x, out=out[whole:])
