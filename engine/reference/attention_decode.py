"""NumPy mirror of `engine.kernels.attention_decode`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.dtypes import accumulation_dtype
from engine.reference._attention import attend, gather_pages
from engine.reference.qk_norm_rope_store import qk_norm_rope_store
from engine.reference.quantize_rows import quantize_rows

__all__ = ["attention_decode"]

Array = np.ndarray[Any, Any]


def attention_decode(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    *,
    block_tables: Array,
    context_lens: Array,
    k: Array | None = None,
    v: Array | None = None,
    positions: Array | None = None,
    cos_sin: Array | None = None,
    slot_mapping: Array | None = None,
    q_weight: Array | None = None,
    k_weight: Array | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    chunk: int = 0,
    tree_mask: Array | None = None,
    sinks: Array | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    quantize_out: bool = False,
    return_lse: bool = False,
) -> Any:
    """softmax(scale Q K^T) V of the last Q tokens of every sequence, causal among themselves.

    With a chunk, a sequence's only query sees the keys of its own chunk of that many positions.
    tree_mask (B, Q) uint64: query i sees query j only if bit j of its mask is set too. If k and v
    (B, 1, K, D) of one new token are given, qk_norm_rope_store runs first. sinks (H,): exp(sink) is
    added to the softmax denominator of each row of its head. With k_scale and v_scale (K,) the
    pages are quantized; the last Q tokens are read from them like all others. With quantize_out a
    token's rows are quantized, with a scale per 128 columns.
    """
    if k is not None:
        assert v is not None and positions is not None
        assert cos_sin is not None and slot_mapping is not None
        q = q.copy()
        qk_norm_rope_store(
            *(q[:, 0], k[:, 0], v[:, 0], positions, cos_sin, k_pages, v_pages, slot_mapping),
            q_weight=q_weight,
            k_weight=k_weight,
            eps=eps,
            weight_offset=weight_offset,
            k_scale=k_scale,
            v_scale=v_scale,
        )
    out = np.zeros(q.shape, q.dtype)
    lse = np.full(q.shape[:3], -np.inf, accumulation_dtype(q.dtype))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    for b, length in enumerate(context_lens):
        keys, values = (
            gather_pages(pages, block_tables[b], length, page_scale)
            for pages, page_scale in ((k_pages, k_scale), (v_pages, v_scale))
        )
        out[b], lse[b] = attend(
            q[b],
            keys,
            values,
            causal=True,
            scale=scale,
            window=(length - 1) % chunk + 1 if chunk else window,
            softcap=softcap,
            tree=None if tree_mask is None else tree_mask[b],
            sinks=sinks,
        )
    lses = (lse,) if return_lse else ()
    if quantize_out:
        codes, scales = quantize_rows(out.reshape(-1, q.shape[2] * q.shape[3]), group=128)
        return (codes.reshape(q.shape), scales.reshape(*q.shape[:2], scales.shape[1]), *lses)
    return (out, *lses) if lses else out
