"""Skinny products, a large matrix times a few vectors, faster than BLAS.

They are limited by reading the matrix once. BLAS first copies the matrix to a layout that pays off
with many vectors, and its threads synchronise. For blocks of few matrix rows BLAS skips the copy,
which saves about a third of the time, and threads with their own blocks need no synchronisation.
The blocks depend on the shapes alone, so the bits do not depend on the number of threads.
"""

from __future__ import annotations

import importlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any

import numpy as np

__all__ = ["multiply_few_rows", "pays"]

Array = np.ndarray[Any, Any]

_MAX_ROWS = 16  # maximum rows of x; beyond, one large product is faster
_MIN_SIZE = 1 << 18  # minimum elements of the matrix
_BLOCK_PRODUCTS = 400_000  # multiply-adds per block; from about 2**19, OpenBLAS copies the matrix
_MAX_BLOCK = 96  # maximum matrix rows per block
_SIZE_PER_THREAD = 1 << 17  # minimum matrix elements per thread
_MAX_THREADS = 8

_in_use = threading.Lock()  # held while the pool is busy; other callers then run without threads


def pays(x: Array, matrix: Array) -> bool:
    """Tell whether `multiply_few_rows` is faster for x (T, N) and the matrix (M, N)."""
    return (
        1 < len(x) <= _MAX_ROWS
        and matrix.size >= _MIN_SIZE
        and matrix.flags.c_contiguous
        and _has_kernels_for_few()
    )


def multiply_few_rows(x: Array, matrix: Array) -> Array:
    """Return x Wᵀ, (T, M) float32, for x (T, N) and the matrix W (M, N), both float32."""
    rows, columns = matrix.shape
    block = max(8, min(_MAX_BLOCK, _BLOCK_PRODUCTS // (len(x) * columns)))
    num_blocks = -(-rows // block)
    out = np.empty((rows, len(x)), np.float32)
    num_threads = min(_num_threads(), num_blocks, max(1, matrix.size // _SIZE_PER_THREAD))
    stops = [num_blocks * (i + 1) // num_threads * block for i in range(num_threads)]
    parts = [slice(start, stop) for start, stop in zip([0, *stops], stops, strict=False)]
    jobs = [partial(_multiply_blocks, matrix[part], x.T, out[part], block) for part in parts]
    if num_threads > 1 and _in_use.acquire(blocking=False):
        try:
            others = [_pool().submit(job) for job in jobs[1:]]
            jobs[0]()
            for other in others:
                other.result()
        finally:
            _in_use.release()
    else:
        for job in jobs:
            job()
    return np.ascontiguousarray(out.T)


def _multiply_blocks(matrix: Array, x: Array, out: Array, block: int) -> None:
    """Multiply `block` rows of the matrix at a time; the last block may be smaller."""
    whole = len(matrix) // block * block
    blocks = matrix[:whole].reshape(-1, block, matrix.shape[1])
    np.matmul(blocks, x, out=out[:whole].reshape(-1, block, x.shape[1]))
    if whole < len(matrix):
        np.matmul(matrix[whole:], x, out=out[whole:])


@cache
def _has_kernels_for_few() -> bool:
    """Tell whether OpenBLAS has kernels that skip the copy (its AVX-512 kernels do)."""
    core = importlib.import_module("numpy._core._multiarray_umath")  # as numpy.show_runtime does
    return bool(getattr(core, "__cpu_features__", {}).get("AVX512_SKX", False))


@cache
def _num_threads() -> int:
    """Return the number of BLAS threads."""
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        if os.environ.get(name, "").isdecimal():
            return max(1, min(int(os.environ[name]), _MAX_THREADS))
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    return min(len(affinity(0)) if affinity else os.cpu_count() or 1, _MAX_THREADS)


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_num_threads() - 1, thread_name_prefix="engine-blas")


def _renew() -> None:
    """Reset the pool and its lock in a forked child: threads exist in the parent only."""
    global _in_use
    _in_use = threading.Lock()
    _pool.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
