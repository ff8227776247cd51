"""Decoding after a shared prefix: its pages are read once instead of once per request."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from engine import device, kernels
from engine.device import array_module
from engine.kernels._contract import FLOATS, INT32, Contract

__all__ = ["attention_shared_prefix"]


def attention_shared_prefix(
    q: Any,
    k_pages: Any,
    v_pages: Any,
    *,
    prefix_blocks: Any,
    prefix_len: Any,
    block_tables: Any,
    context_lens: Any,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Any = None,
    num_splits: int | None = None,
    max_context_len: int | None = None,
    out: Any = None,
    return_lse: bool = False,
) -> Any:
    """Attend from the last Q tokens of every request to a shared prefix and to its own pages.

    For a prefix of whole pages, the result equals `attention_decode` over the prefix's pages
    followed by the request's own. Here a prefix may also end within its last page.

    Parameters
    ----------
    q : (B, Q, H, D) array of float32, float16 or bfloat16
        The last Q tokens of each request.
    k_pages, v_pages : (P, K, block_size, D) arrays of q's dtype
        Pages of the KV cache.
    prefix_blocks : (NP,) array of int32
        Ids of the prefix's pages. Entries past its length are never read.
    prefix_len : (1,) array of int32
        Number of keys of the prefix; may be 0. On CUDA it is read on the device, so that a captured
        graph sees changes.
    block_tables : (B, NB) array of int32
        Ids of each request's pages after the prefix: ``tables[:, NP:]`` of tables that include it.
    context_lens : (B,) array of int32
        Keys of each request after the prefix, its Q query tokens included: at least Q. A row with 0
        (padding) attends to the prefix alone.
    scale, softcap, sinks, num_splits, max_context_len : optional
        See `attention_decode`; the last two apply to the requests' own pages.
    out : (B, Q, H, D) array of q's dtype, optional
        Contiguous array for the result; may be `q`.
    return_lse : bool
        Return the log-sum-exp too.

    Returns
    -------
    out : (B, Q, H, D) array of q's dtype
    lse : (B, Q, H) array of float32
        Natural logarithm of the sum of exp(score) over prefix and own keys, and of exp(sink).

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument violates the contract of one of the ops; lengths are checked on the CPU only.

    Notes
    -----
    All B * Q tokens attend to the prefix in one non-causal call of `attention_prefill`, and to
    their own pages in one of `attention_decode`. `merge_states` combines the two, exactly up to
    rounding [1]_. Sliding windows are not supported: a window at the end of a request rarely
    reaches back to a prefix that is worth sharing.

    References
    ----------
    .. [1] Juravsky et al.: Hydragen, arXiv:2402.05099.

    Examples
    --------
    >>> import numpy as np
    >>> pages = np.arange(3 * 16, dtype=np.float32).reshape(3, 1, 16, 1)
    >>> q, lens = np.zeros((2, 1, 1, 1), np.float32), np.array([1, 2], np.int32)
    >>> attention_shared_prefix(  # the means of 0..15 and 16, and of 0..15, 32 and 33
    ...     q, pages, pages, prefix_blocks=np.array([0], np.int32),
    ...     prefix_len=np.array([16], np.int32), block_tables=np.array([[1], [2]], np.int32),
    ...     context_lens=lens).ravel().round(3)
    array([ 8.   , 10.278], dtype=float32)
    """
    q, prefix_blocks, prefix_len = _checked(q, prefix_blocks, prefix_len, context_lens, out)
    batch, num_queries, num_heads, head_dim = q.shape
    tokens = batch * num_queries
    rule: dict[str, Any] = {"scale": scale, "softcap": softcap}
    shared = kernels.attention_prefill(
        q.reshape(tokens, num_heads, head_dim),
        k_pages,
        v_pages,
        cu_seqlens_q=_one_sequence(array_module(q), tokens),
        block_tables=prefix_blocks[None],
        context_lens=prefix_len,
        causal=False,
        max_seqlen_q=tokens,
        return_lse=True,
        **rule,
    )
    own = kernels.attention_decode(
        q,
        k_pages,
        v_pages,
        block_tables=block_tables,
        context_lens=context_lens,
        sinks=sinks,  # in one of the two calls only: merge_states adds the sums of both
        num_splits=num_splits,
        max_context_len=max_context_len,
        out=out,
        return_lse=True,
        **rule,
    )
    rows = own[0].reshape(shared[0].shape)
    merged, lse = kernels.merge_states(
        (shared[0], rows), (shared[1], own[1].reshape(shared[1].shape)), out=rows
    )
    merged = merged.reshape(q.shape) if out is None else out
    return (merged, lse.reshape(q.shape[:3])) if return_lse else merged


def _checked(
    q: Any, prefix_blocks: Any, prefix_len: Any, context_lens: Any, out: Any
) -> tuple[Any, Any, Any]:
    """Do the checks that the ops omit; return `q`, `prefix_blocks` and `prefix_len`."""
    call = Contract("attention_shared_prefix")
    q = call.array("q", q, "B Q H D", FLOATS, layout="rows")
    prefix_blocks = call.array("prefix_blocks", prefix_blocks, "NP", INT32)
    prefix_len = call.array("prefix_len", prefix_len, "1", INT32)
    lens = call.array("context_lens", context_lens, "B", INT32)
    if out is not None:  # must not be copied: the result is merged into it in place
        call.written("out", out, "B Q H D", q.dtype)
    if call.on_cpu:
        ok = not bool(np.any((lens > 0) & (lens < call["Q"])))
        call.check("context_lens", ok, f"at least Q = {call['Q']}, or 0", lens.tolist())
    return q, prefix_blocks, prefix_len


def _one_sequence(xp: Any, tokens: int) -> Any:
    """Return [0, tokens] in module `xp`; cached: a graph capture cannot copy from the host."""
    index = -1 if xp is np else device.cupy().cuda.runtime.getDevice()
    return _cached_sequence(xp, index, tokens)


@lru_cache(maxsize=1024)
def _cached_sequence(xp: Any, index: int, tokens: int) -> Any:
    return xp.asarray(np.array([0, tokens], np.int32))
