"""NumPy mirror of `engine.kernels.lora_shrink`: its specification."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from engine.dtypes import accumulation_dtype
from engine.reference._row_by_row import multiply_row_by_row

__all__ = ["lora_shrink"]

Array = np.ndarray[Any, Any]

_GRAIN = 64  # values of k; splits begin at multiples of it


def lora_shrink(
    x: Array,
    a: Array,
    order: Array,
    offsets: Array,
    *,
    num_splits: int = 1,
    out: Array | None = None,
) -> Array:
    """out[p, t] = a[s] x[t] over split p of k, in float32, for each token t of each adapter s.

    Rows of tokens without an adapter are not written; they are NaN if `out` is None.
    """
    real = accumulation_dtype(x.dtype)
    if out is None:
        out = np.full((num_splits, len(x), a.shape[1]), np.nan, real)
    for matrix, begin, end in zip(a, offsets[:-1], offsets[1:], strict=True):
        tokens = order[begin:end]
        if not tokens.size:
            continue
        for split, part in enumerate(_splits(x.shape[1], num_splits)):
            rows = x[tokens, part].astype(real)
            # Row by row: BLAS's order of summation depends on the number of tokens.
            out[split, tokens] = multiply_row_by_row(rows, matrix[:, part].astype(real).T)
    return out


def _splits(depth: int, num_splits: int) -> Iterator[slice]:
    """Yield the range of k of each split; a split may be empty."""
    grains = -(-depth // _GRAIN)
    for split in range(num_splits):
        begin = grains * split // num_splits * _GRAIN
        end = grains * (split + 1) // num_splits * _GRAIN
        yield slice(begin, min(end, depth))
