"""NumPy mirror of `engine.kernels.kv_gather`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["kv_gather"]

Array = np.ndarray[Any, Any]


def kv_gather(
    k_pages: Array,
    v_pages: Array,
    block_tables: Array,
    context_lens: Array,
    cu_seqlens_k: Array,
    *,
    total_tokens: int | None = None,
) -> tuple[Array, Array]:
    """Row cu_seqlens_k[b] + p is position p of sequence b; further rows are NaN."""
    _, num_heads, block_size, head_dim = k_pages.shape
    num_rows = int(cu_seqlens_k[-1]) if total_tokens is None else total_tokens

    def gather(pages: Array) -> Array:
        rows = np.full((num_rows, num_heads, head_dim), np.nan, pages.dtype)
        for b, length in enumerate(context_lens):
            blocks = block_tables[b, : -(-length // block_size)]
            shape = len(blocks) * block_size, num_heads, head_dim
            tokens = pages[blocks].swapaxes(1, 2).reshape(shape)
            rows[cu_seqlens_k[b] : cu_seqlens_k[b + 1]] = tokens[:length]
        return rows

    return gather(k_pages), gather(v_pages)
