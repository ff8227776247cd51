"""NumPy mirror of `engine.kernels.mla_decode`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.dtypes import accumulation_dtype
from engine.reference._attention import attend, gather_pages

__all__ = ["mla_decode"]

Array = np.ndarray[Any, Any]


def mla_decode(
    q: Array,
    q_rope: Array,
    pages: Array,
    *,
    block_tables: Array,
    context_lens: Array,
    scale: float,
    return_lse: bool = False,
) -> Any:
    """softmax(scale (Q C^T + Qr Kr^T)) C of the last Q tokens of every sequence, causal.

    A page (block_size, L + R) holds the latents C and rotated keys Kr of its tokens.
    """
    (*_, num_heads, latent) = q.shape
    real = accumulation_dtype(q.dtype)
    queries = np.concatenate([q, q_rope], axis=-1)
    out = np.zeros(q.shape, q.dtype)
    lse = np.full(q.shape[:3], -np.inf, real)
    for b, length in enumerate(context_lens):
        keys = gather_pages(pages[:, None], block_tables[b], length).astype(real)
        # One product per head: the bits of a head do not depend on how many there are.
        keys = np.broadcast_to(keys, (num_heads, *keys.shape[1:]))  # (H, length, L + R)
        values = keys[..., :latent]
        out[b], lse[b] = attend(
            queries[b], keys, values, causal=True, scale=scale, window=0, softcap=0.0
        )
    return (out, lse) if return_lse else out
