"""NumPy mirror of `engine.kernels.attention_prefill`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.dtypes import accumulation_dtype
from engine.reference._attention import attend, gather_pages

__all__ = ["attention_prefill"]

Array = np.ndarray[Any, Any]


def attention_prefill(
    q: Array,
    k: Array,
    v: Array,
    *,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array | None = None,
    block_tables: Array | None = None,
    context_lens: Array | None = None,
    causal: bool = True,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    pattern: Any = None,
    sinks: Array | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    return_lse: bool = False,
) -> Any:
    """softmax(scale Q K^T) V for every sequence; dense k (Tk,K,D), v (Tk,K,V), or pages (P,K,bs,D).

    sinks (H,): exp(sink) is added to the softmax denominator of each row of its head. With k_scale
    and v_scale (K,) the pages are quantized; new tokens are read from them like all others, so the
    result does not depend on how a prompt is split into chunks.
    """
    out = np.zeros((*q.shape[:2], v.shape[-1]), q.dtype)
    lse = np.full(q.shape[:2], -np.inf, accumulation_dtype(q.dtype))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    for b in range(len(cu_seqlens_q) - 1):
        rows = slice(cu_seqlens_q[b], cu_seqlens_q[b + 1])
        if block_tables is not None and context_lens is not None:
            keys, values = (
                gather_pages(x, block_tables[b], context_lens[b], page_scale)
                for x, page_scale in ((k, k_scale), (v, v_scale))
            )
        else:
            assert cu_seqlens_k is not None
            tokens = slice(cu_seqlens_k[b], cu_seqlens_k[b + 1])
            keys = k[tokens].transpose(1, 0, 2)
            values = v[tokens].transpose(1, 0, 2)
        rule = {"scale": scale, "window": window, "softcap": softcap, "pattern": pattern}
        result = attend(q[rows], keys, values, causal=causal, sinks=sinks, **rule)
        out[rows], lse[rows] = result
    return (out, lse) if return_lse else out
