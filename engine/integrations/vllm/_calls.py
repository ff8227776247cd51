"""Calls of the paged ops that write into tensors of vLLM, prepared once per layout."""

from __future__ import annotations

from typing import Any

from engine import kernels
from engine.integrations.torch._core import on_tensors

__all__ = ["DECODE", "PREFILL", "STORE"]


def _store(
    k: Any, v: Any, k_pages: Any, v_pages: Any, k_scale: Any, v_scale: Any, slot_mapping: Any
) -> tuple[()]:
    kernels.kv_store(k, v, k_pages, v_pages, slot_mapping, k_scale=k_scale, v_scale=v_scale)
    return ()


def _decode(
    q: Any,
    out: Any,
    k_pages: Any,
    v_pages: Any,
    k_scale: Any,
    v_scale: Any,
    sinks: Any,
    block_tables: Any,
    context_lens: Any,
    num_queries: int,
    max_context_len: int,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[()]:
    """Decode `num_queries` tokens of each sequence; q and out are (B * num_queries, H, D)."""
    shape = (-1, num_queries, *q.shape[1:])
    kernels.attention_decode(
        q.reshape(shape),
        k_pages,
        v_pages,
        block_tables=block_tables,
        context_lens=context_lens,
        k_scale=k_scale,
        v_scale=v_scale,
        sinks=sinks,
        max_context_len=max_context_len,
        scale=scale,
        window=window,
        softcap=softcap,
        out=out.reshape(shape),
    )
    return ()


def _prefill(
    q: Any,
    out: Any,
    k_pages: Any,
    v_pages: Any,
    k_scale: Any,
    v_scale: Any,
    sinks: Any,
    block_tables: Any,
    context_lens: Any,
    cu_seqlens_q: Any,
    max_seqlen_q: int,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[()]:
    kernels.attention_prefill(
        q,
        k_pages,
        v_pages,
        cu_seqlens_q=cu_seqlens_q,
        block_tables=block_tables,
        context_lens=context_lens,
        k_scale=k_scale,
        v_scale=v_scale,
        sinks=sinks,
        max_seqlen_q=max_seqlen_q,
        scale=scale,
        window=window,
        softcap=softcap,
        out=out,
    )
    return ()


STORE = on_tensors("vllm_kv_store", _store)
DECODE = on_tensors("vllm_attention_decode", _decode)
PREFILL = on_tensors("vllm_attention_prefill", _prefill)
