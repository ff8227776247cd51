"""Attention of the newest tokens against pages: `cuda_src/attention_decode.cu`, portable tier."""

from __future__ import annotations

from typing import Any

from engine import reference
from engine.kernels._attention import Pages, ScoreRule, check_count, check_heads
from engine.kernels._contract import FLOATS, Contract

__all__ = ["attention_decode"]


def attention_decode(
    q: Any,
    k_pages: Any,
    v_pages: Any,
    *,
    block_tables: Any,
    context_lens: Any,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    num_splits: int | None = None,
    max_context_len: int | None = None,
    out: Any = None,
    return_lse: bool = False,
) -> Any:
    """Attend from the newest Q tokens of every sequence to its pages: softmax(scale Q Kᵀ) V.

    Parameters
    ----------
    q : (B, Q, H, D) array of float32, float16 or bfloat16
        The last Q tokens of each sequence, D <= 256. A view whose last axis is contiguous is taken
        as it is.
    k_pages, v_pages : (P, K, block_size, D) arrays of q's dtype
        Contiguous. H is a multiple of K: query head h reads head h // (H // K). block_size is 16,
        32, 64 or 128.
    block_tables : (B, NB) array of int32
        Ids of each sequence's pages. Entries past its length are never read.
    context_lens : (B,) array of int32
        Keys of each sequence, the Q query tokens included: query i of Q sees keys 0 to len - Q + i.
    scale : float, optional
        Factor of the scores; D**-0.5 by default.
    window : int
        Each query sees only its last `window` keys, its own included; 0 means no limit.
    softcap : float
        Replaces a scaled score s by softcap * tanh(s / softcap); 0 means not to.
    num_splits : int, optional
        Into how many parts the keys of a sequence are cut, each worked on by a block of its own;
        chosen by default. The result depends on it by rounding only.
    max_context_len : int, optional
        Bound of `context_lens`. Without it CUDA must synchronise once to find out.
    out : (B, Q, H, D) array of q's dtype, optional
        Where to put the result.
    return_lse : bool
        Return the log-sum-exp too.

    Returns
    -------
    out : (B, Q, H, D) array of q's dtype
        0 where a query sees no key.
    lse : (B, Q, H) array of float32
        Natural logarithm of the sum of exp(score); -inf where a query sees no key.

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument breaks the contract. Lengths and block ids are checked on the CPU only; on
        CUDA they are clamped to the arrays.

    Notes
    -----
    Scores, softmax and sums are float32; exp(score - running max) is rounded to q's dtype before it
    multiplies V; the parts are combined by their log-sum-exp in float32, always in the same order,
    and the result is rounded once [1]_.

    References
    ----------
    .. [1] Dao, Haziza, Massa, Sizov: Flash-Decoding for long-context inference, 2023.

    Examples
    --------
    >>> import numpy as np
    >>> pages = np.arange(4 * 16, dtype=np.float32).reshape(4, 1, 16, 1)
    >>> tables, lens = np.array([[3, 1]], np.int32), np.array([17], np.int32)
    >>> q = np.zeros((1, 1, 1, 1), np.float32)
    >>> attention_decode(q, pages, pages, block_tables=tables, context_lens=lens).round(3)
    array([[[[53.176]]]], dtype=float32)
    """
    call = Contract("attention_decode")
    q = call.array("q", q, "B Q H D", FLOATS, layout="rows")
    pages = Pages.checked(
        call, {"k_pages": k_pages, "v_pages": v_pages}, q.dtype, block_tables, context_lens
    )
    check_heads(call)
    rule = ScoreRule.checked(call, call["D"], scale, window, softcap)
    if num_splits is not None:
        check_count(call, "num_splits", num_splits)
        call.check("num_splits", num_splits > 0, "1 or more", num_splits)
    if max_context_len is not None:
        check_count(call, "max_context_len", max_context_len)
    if call.on_cpu:
        result = reference.attention_decode(
            q,
            pages.k,
            pages.v,
            block_tables=pages.block_tables,
            context_lens=pages.context_lens,
            scale=rule.scale,
            window=rule.window,
            softcap=rule.softcap,
            return_lse=True,
        )
        out = call.finish(out, result[0])
        return (out, result[1]) if return_lse else out
    raise NotImplementedError
