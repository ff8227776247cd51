"""NumPy mirror of `engine.kernels.attention_decode`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.reference._attention import attend, gather_pages

__all__ = ["attention_decode"]

Array = np.ndarray[Any, Any]


def attention_decode(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    *,
    block_tables: Array,
    context_lens: Array,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    tree_mask: Array | None = None,
    return_lse: bool = False,
) -> Any:
    """softmax(scale Q K^T) V of the last Q tokens of every sequence, causal among themselves.

    tree_mask (B, Q) uint64: query i sees query j only where bit j of its mask is set as well.
    """
    out = np.zeros(q.shape, q.dtype)
    lse = np.full(q.shape[:3], -np.inf, np.float32)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    for b, length in enumerate(context_lens):
        k, v = (gather_pages(pages, block_tables[b], length) for pages in (k_pages, v_pages))
        out[b], lse[b] = attend(
            q[b],
            k,
            v,
            causal=True,
            scale=scale,
            window=window,
            softcap=softcap,
            tree=None if tree_mask is None else tree_mask[b],
        )
    return (out, lse) if return_lse else out
