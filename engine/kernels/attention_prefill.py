"""Attention over whole sequences or chunks: `cuda_src/attention_prefill.cu`, portable tier."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine import reference
from engine.kernels._attention import Pages, ScoreRule, check_count, check_heads
from engine.kernels._contract import FLOATS, INT32, Contract

__all__ = ["attention_prefill"]


def attention_prefill(
    q: Any,
    k: Any,
    v: Any,
    *,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any = None,
    block_tables: Any = None,
    context_lens: Any = None,
    causal: bool = True,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    max_seqlen_q: int | None = None,
    out: Any = None,
    return_lse: bool = False,
) -> Any:
    """Attend from the last tokens of every sequence to its keys: softmax(scale Q Kᵀ) V.

    Parameters
    ----------
    q : (Tq, H, D) array of float32, float16 or bfloat16
        Query tokens of all sequences, one after another. D <= 256. A view whose last axis is
        contiguous is taken as it is, such as the heads of a fused qkv row.
    k, v : (Tk, K, D) or (P, K, block_size, D) arrays of q's dtype
        Dense keys and values (views as for `q`), or contiguous pages. H is a multiple of K: query
        head h reads head h // (H // K). block_size is 16, 32, 64 or 128.
    cu_seqlens_q : (B+1,) array of int32
        Sequence b's queries are ``q[cu_seqlens_q[b]:cu_seqlens_q[b + 1]]``: from 0 to Tq.
    cu_seqlens_k : (B+1,) array of int32
        The same for dense `k` and `v`; not together with `block_tables`.
    block_tables : (B, NB) array of int32
        Ids of each sequence's pages. Entries past its length are never read.
    context_lens : (B,) array of int32
        Keys of each sequence in pages, the query tokens' own included.
    causal : bool
        Query i of n sees keys 0 to len - n + i; else every query sees all keys.
    scale : float, optional
        Factor of the scores; D**-0.5 by default.
    window : int
        Each query sees only its last `window` keys, its own included; 0 means no limit. Needs
        `causal`.
    softcap : float
        Replaces a scaled score s by softcap * tanh(s / softcap); 0 means not to.
    max_seqlen_q : int, optional
        Bound of the queries of one sequence. Without it CUDA must synchronise once to find out.
    out : (Tq, H, D) array of q's dtype, optional
        Where to put the result; must not share memory with `q`, `k` or `v`.
    return_lse : bool
        Return the log-sum-exp too.

    Returns
    -------
    out : (Tq, H, D) array of q's dtype
        0 where a query sees no key.
    lse : (Tq, H) array of float32
        Natural logarithm of the sum of exp(score); -inf where a query sees no key.

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument breaks the contract. Lengths and block ids are checked on the CPU only; on
        CUDA they are clamped to the arrays.

    Notes
    -----
    Scores, softmax and sums are float32; exp(score - running max) is rounded to q's dtype before it
    multiplies V; the result is rounded once [1]_.

    References
    ----------
    .. [1] Dao: FlashAttention-2, arXiv:2307.08691.

    Examples
    --------
    >>> import numpy as np
    >>> q = k = np.ones((2, 1, 4), np.float32)
    >>> v = np.array([[[0, 0, 0, 0]], [[2, 4, 6, 8]]], np.float32)
    >>> cu_seqlens = np.array([0, 2], np.int32)
    >>> attention_prefill(q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)[:, 0]
    array([[0., 0., 0., 0.],
           [1., 2., 3., 4.]], dtype=float32)
    """
    call = Contract("attention_prefill")
    q = call.array("q", q, "Tq H D", FLOATS, layout="rows")
    cu_seqlens_q = call.array("cu_seqlens_q", cu_seqlens_q, "B+1", INT32)
    call.check("cu_seqlens_q", cu_seqlens_q.size > 0, "of length B+1 >= 1", cu_seqlens_q)
    call.dims["B"] = cu_seqlens_q.size - 1
    _check_cu_seqlens(call, "cu_seqlens_q", cu_seqlens_q, q.shape[0])
    pages = None
    if block_tables is None:
        call.check("context_lens", context_lens is None, "None with dense k, v", context_lens)
        k = call.array("k", k, "Tk K D", q.dtype, layout="rows")
        v = call.array("v", v, "Tk K D", q.dtype, layout="rows")
        cu_seqlens_k = call.array("cu_seqlens_k", cu_seqlens_k, "B+1", INT32)
        _check_cu_seqlens(call, "cu_seqlens_k", cu_seqlens_k, k.shape[0])
    else:
        call.check("cu_seqlens_k", cu_seqlens_k is None, "None with block_tables", cu_seqlens_k)
        pages = Pages.checked(call, {"k": k, "v": v}, q.dtype, block_tables, context_lens)
        k, v, block_tables, context_lens = pages.k, pages.v, pages.block_tables, pages.context_lens
    check_heads(call)
    rule = ScoreRule.checked(call, call["D"], scale, window, softcap)
    call.check("window", causal or not window, "0 unless causal", window)
    if max_seqlen_q is not None:
        check_count(call, "max_seqlen_q", max_seqlen_q)
    if call.on_cpu:
        result = reference.attention_prefill(
            q,
            k,
            v,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            block_tables=block_tables,
            context_lens=context_lens,
            causal=causal,
            scale=rule.scale,
            window=rule.window,
            softcap=rule.softcap,
            return_lse=True,
        )
        out = call.finish(out, result[0])
        return (out, result[1]) if return_lse else out
    raise NotImplementedError


def _check_cu_seqlens(call: Contract, name: str, cu_seqlens: Any, total: int) -> None:
    """On the CPU, check that the sequences cover rows 0 to `total` (on the GPU: a sync)."""
    if call.on_cpu:
        ends = bool(cu_seqlens[0] == 0 and cu_seqlens[-1] == total)
        ok = ends and bool(np.all(cu_seqlens[1:] >= cu_seqlens[:-1]))
        call.check(name, ok, f"rising from 0 to {total}", cu_seqlens.tolist())
