"""Calls of the paged ops that write into tensors of vLLM, prepared once per layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from engine import kernels
from engine.integrations.torch._core import Operator
from engine.integrations.torch._tensors import array_of

__all__ = ["DECODE", "PREFILL", "STORE"]


class _Call:
    """Runs `function` on tensors: on CUDA as prepared launches, on the CPU as NumPy mirrors."""

    def __init__(self, name: str, function: Callable[..., None]) -> None:
        self._function = function
        self._operator = Operator(name, function, _no_derivative, None)

    def __call__(self, *args: Any) -> None:
        if args[0].is_cuda:
            self._operator.launch(*args)
            return
        self._function(*(array_of(a) if isinstance(a, torch.Tensor) else a for a in args))


def _no_derivative(*_: Any) -> Any:
    raise NotImplementedError("attention over pages has no derivative")


def _store(
    k: Any, v: Any, k_pages: Any, v_pages: Any, k_scale: Any, v_scale: Any, slot_mapping: Any
) -> None:
    kernels.kv_store(k, v, k_pages, v_pages, slot_mapping, k_scale=k_scale, v_scale=v_scale)


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
) -> None:
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
) -> None:
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


STORE = _Call("vllm_kv_store", _store)
DECODE = _Call("vllm_attention_decode", _decode)
PREFILL = _Call("vllm_attention_prefill", _prefill)
