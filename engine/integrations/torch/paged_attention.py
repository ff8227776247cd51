"""Attention over a paged KV cache, on tensors; for inference, without a derivative."""

from __future__ import annotations

from typing import Any

import torch

from engine import kernels
from engine.errors import ContractError
from engine.integrations.torch._core import define, to_autocast_dtype
from engine.integrations.torch._tensors import accumulation_dtype

__all__ = ["attention_paged"]

_ARGUMENTS = (
    "Tensor q, Tensor k_pages, Tensor v_pages, Tensor block_tables, Tensor context_lens, "
    "Tensor? cu_seqlens_q, Tensor? sinks, Tensor? k_scale, Tensor? v_scale, SymInt max_seqlen_q, "
    "float? scale, int window, float softcap"
)


def _attend(
    out: Any,
    q: Any,
    k_pages: Any,
    v_pages: Any,
    block_tables: Any,
    context_lens: Any,
    cu_seqlens_q: Any,
    sinks: Any,
    k_scale: Any,
    v_scale: Any,
    max_seqlen_q: int,
    scale: float | None,
    window: int,
    softcap: float,
    **more: Any,
) -> Any:
    options = {
        "block_tables": block_tables,
        "context_lens": context_lens,
        "sinks": sinks,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "scale": scale,
        "window": window,
        "softcap": softcap,
        "out": out,
        **more,
    }
    if cu_seqlens_q is None:
        return kernels.attention_decode(q, k_pages, v_pages, **options)
    longest = {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_seqlen_q}
    return kernels.attention_prefill(q, k_pages, v_pages, **options, **longest)


def _paged(q: Any, *args: Any) -> tuple[Any, Any]:
    out, lse = _attend(None, q, *args, return_lse=True)
    return out, lse


def _fake(q: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    lse = q.new_empty(q.shape[:-1], dtype=accumulation_dtype(q.dtype))
    return q.new_empty(q.shape), lse


def _paged_out(out: Any, *args: Any) -> None:
    _attend(out, *args)


_PAGED = define(f"attention_paged({_ARGUMENTS}) -> (Tensor, Tensor)", _paged, _fake)
_PAGED_OUT = define(
    f"attention_paged_out(Tensor(a!) out, {_ARGUMENTS}) -> ()", _paged_out, lambda *_: None
)


def attention_paged(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    """Attend from the last tokens of each sequence to its keys in pages, causally.

    Parameters
    ----------
    q : (B, Q, H, D) tensor of float32, float16 or bfloat16, or (T, H, D) with `cu_seqlens_q`
        The last Q tokens of each sequence (decoding), or chunks of any lengths, concatenated.
    k_pages, v_pages : (P, K, block_size, D) tensors of q's dtype
        May be views of one cache, such as one that holds a token's key and value side by side.
        block_size is 16, 32, 64 or 128. uint8 (or float8_e4m3fn) and int8 pages are quantized.
    block_tables : (B, NB) tensor of int32
        Ids of each sequence's pages.
    context_lens : (B,) tensor of int32
        Number of keys of each sequence, including those of the tokens of q.
    cu_seqlens_q : (B+1,) tensor of int32, optional
        First row of each sequence's chunk in q, then the end.
    max_seqlen_q : int, optional
        Upper bound of the chunks' lengths; by default T.
    scale, window, softcap, sinks
        See `attention`.
    k_scale, v_scale : (K,) tensors of float32, optional
        Scales of quantized pages: a key or value is code * scale.
    out : tensor like q, optional
        Tensor for the result, whose last axis is contiguous; not combined with `return_lse`.
    return_lse : bool
        Also return the log-sum-exp.

    Returns
    -------
    out : tensor of q's shape and dtype
    lse : tensor of float32 of q's shape without its last axis

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument breaks the contract of `engine.kernels.attention_decode` or
        `attention_prefill`. A derivative is an error.

    Examples
    --------
    >>> pages = torch.arange(4 * 16.0).reshape(4, 1, 16, 1)
    >>> table = torch.tensor([[3, 0]], dtype=torch.int32)
    >>> lens = torch.tensor([16], dtype=torch.int32)
    >>> attention_paged(torch.zeros(1, 1, 1, 1), pages, pages, table, lens).item()
    55.5
    """
    (q,) = to_autocast_dtype(q)
    if sinks is not None:
        sinks = sinks.to(accumulation_dtype(q.dtype))
    longest = q.shape[0] if max_seqlen_q is None else max_seqlen_q
    arguments = (q, k_pages, v_pages, block_tables, context_lens, cu_seqlens_q, sinks)
    options = (k_scale, v_scale, longest, scale, window, softcap)
    if out is None:
        results = _PAGED(*arguments, *options)
        return results if return_lse else results[0]
    needs_grad = torch.is_grad_enabled() and any(
        value is not None and value.requires_grad for value in arguments
    )
    if needs_grad or return_lse:
        wanted = "None if an argument requires a gradient, or with return_lse"
        raise ContractError(f"attention_paged: out: must be {wanted}; got a tensor")
    _PAGED_OUT(out, *arguments, *options)
    if not torch.compiler.is_compiling() and not out.is_inference():
        torch.autograd.graph.increment_version(out)  # a graph that saved `out` must notice
    return out
