"""NumPy mirror of `engine.kernels.lora_expand`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.dtypes import accumulation_dtype
from engine.reference._row_by_row import multiply_row_by_row

__all__ = ["lora_expand"]

Array = np.ndarray[Any, Any]


def lora_expand(
    h: Array,
    b: Array,
    order: Array,
    offsets: Array,
    *,
    bounds: tuple[int, ...],
    bias: Array | None = None,
    accumulate: bool = False,
    out: Array | None = None,
) -> Array:
    """out[t] = b[s] h[t] + bias[s], or out[t] + that, for each token t of each adapter s.

    The partial sums of h are added in order and rounded to b's dtype. Products are float32, and the
    result is rounded once. A token without an adapter gets 0, or keeps its row if `accumulate`.
    """
    real = accumulation_dtype(b.dtype)
    rank = b.shape[2]
    if out is None:
        out = np.zeros((h.shape[1], b.shape[1]), b.dtype)
    elif not accumulate:
        out[...] = 0
    for adapter, matrix in enumerate(b):
        tokens = order[offsets[adapter] : offsets[adapter + 1]]
        if not tokens.size:
            continue
        sums = h[0, tokens]
        for partial in h[1:]:
            sums = sums + partial[tokens]
        rows = sums.astype(b.dtype).astype(real)
        begin = 0
        for part, end in enumerate(bounds):
            low = rows[:, part * rank : (part + 1) * rank]
            # Row by row: BLAS's order of summation depends on the number of tokens.
            y = multiply_row_by_row(low, matrix[begin:end].astype(real).T)
            if bias is not None:
                y += bias[adapter, begin:end].astype(real)
            if accumulate:
                y += out[tokens, begin:end].astype(real)
            out[tokens, begin:end] = y.astype(b.dtype)
            begin = end
    return out
