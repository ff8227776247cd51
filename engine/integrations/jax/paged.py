"""Attention over a paged KV cache on JAX's arrays, and the store of new keys and values."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from engine import kernels
from engine.integrations.jax._contract import TraceContract
from engine.integrations.jax._operators import Shapes, Struct, define, like
from engine.kernels._attention import (
    BLOCK_SIZES,
    ScoreRule,
    check_count,
    check_heads,
    checked_sinks,
)
from engine.kernels._contract import FLOAT32, FLOATS

__all__ = ["attention_paged", "kv_store"]

_CODES = (jnp.uint8, jnp.int8)
_ARRAYS = ("block_tables", "context_lens", "sinks", "k_scale", "v_scale", "cu_seqlens_q")


def _out(q: Any, *_: Any, return_lse: bool, **__: Any) -> Shapes:
    out = like(q)
    return [out, Struct(q.shape[:-1], FLOAT32)] if return_lse else [out]


def _attend(op: Any, q: Any, k_pages: Any, v_pages: Any, *rest: Any, **options: Any) -> Any:
    """Call an op of the catalog; `rest` are `_ARRAYS`, for `attention_decode` without the last."""
    return op(q, k_pages, v_pages, **dict(zip(_ARRAYS, rest, strict=False)), **options)


def _store(*arrays: Any) -> None:
    kernels.kv_store(*arrays[:5], k_scale=arrays[5], v_scale=arrays[6])


def _pages(*arrays: Any) -> Shapes:
    return [like(a) for a in arrays[2:4]]


_DECODE = define(
    "attention_paged",
    partial(_attend, kernels.attention_decode),
    _out,
    rows=(0, 3, 4),
    merges=True,
)
_CHUNKS = define("attention_paged_chunks", partial(_attend, kernels.attention_prefill), _out)
_STORE = define("kv_store", _store, _pages, aliases={2: 0, 3: 1}, pairs=(4,))


def attention_paged(
    q: Any,
    k_pages: Any,
    v_pages: Any,
    block_tables: Any,
    context_lens: Any,
    *,
    cu_seqlens_q: Any = None,
    max_seqlen_q: int | None = None,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    return_lse: bool = False,
) -> Any:
    """Attend from the newest tokens of each sequence to its pages. It has no gradient.

    Parameters
    ----------
    q : (B, Q, H, D) or, with `cu_seqlens_q`, (T, H, D) array of float32, float16 or bfloat16
        The last tokens of each sequence, D <= 256.
    k_pages, v_pages : (P, K, block_size, D) arrays of q's dtype, uint8 or int8
        H is a multiple of K. block_size is 16, 32, 64 or 128. uint8 (e4m3) and int8 pages are
        quantized. See `kv_store`.
    block_tables : (B, NB) array of integers
        Ids of each sequence's pages. Entries beyond its length are never read.
    context_lens : (B,) array of integers
        Number of keys of each sequence, including those of its query tokens: query i of n sees keys
        0 to len - n + i. Lengths and ids are checked on CPUs only; on GPUs they are clamped.
    cu_seqlens_q : (B + 1,) array of integers, optional
        First row of each sequence's queries, then the end. For chunks of a prompt.
    max_seqlen_q : int, optional
        Upper bound of the queries per sequence; needed with `cu_seqlens_q`.
    scale, window, softcap, sinks
        See `attention`.
    k_scale, v_scale : (K,) arrays of float32, optional
        Scales of quantized pages: a key or value is code * scale.
    return_lse : bool
        Also return the log-sum-exp.

    Returns
    -------
    out : array of q's shape and dtype
    lse : array of q's shape without D, float32
        Only with `return_lse`.

    Examples
    --------
    >>> pages = jnp.arange(4 * 16.0).reshape(4, 1, 16, 1)
    >>> q = jnp.zeros((1, 1, 1, 1))
    >>> attention_paged(q, pages, pages, jnp.array([[3, 1]]), jnp.array([17]))
    Array([[[[53.176...]]]], dtype=float32)
    """
    call = TraceContract("attention_paged")
    is_chunked = cu_seqlens_q is not None
    q = call.array("q", q, "T H D" if is_chunked else "B Q H D", FLOATS)
    pages = _checked_pages(call, q.dtype, k_pages, v_pages)
    check_heads(call)
    tables = call.integers("block_tables", block_tables, "B NB")
    lens = call.integers("context_lens", context_lens, "B")
    scales = _checked_scales(call, pages[0].dtype, k_scale, v_scale)
    rule = ScoreRule.checked(call, call["D"], scale, window, softcap)
    options = {"scale": rule.scale, "window": rule.window, "softcap": rule.softcap}
    options["return_lse"] = bool(return_lse)
    arrays = (q, *pages, tables, lens, checked_sinks(call, sinks), *scales)
    if is_chunked:
        starts = call.integers("cu_seqlens_q", cu_seqlens_q, str(call["B"] + 1))
        options["max_seqlen_q"] = check_count(call, "max_seqlen_q", max_seqlen_q)
        results = _CHUNKS(*arrays, starts, **options)
    else:
        call.check("max_seqlen_q", max_seqlen_q is None, "None without cu_seqlens_q", max_seqlen_q)
        results = _DECODE(*arrays, **options)
    return tuple(results) if return_lse else results[0]


def kv_store(
    k: Any,
    v: Any,
    k_pages: Any,
    v_pages: Any,
    slot_mapping: Any,
    *,
    k_scale: Any = None,
    v_scale: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Write the keys and values of new tokens to a paged KV cache.

    XLA writes in place if the pages are not used afterwards: donate them (`donate_argnums`), or
    carry them through a loop. Otherwise it copies the pages first.

    Parameters
    ----------
    k, v : (T, K, D) array of float32, float16 or bfloat16
    k_pages, v_pages : (P, K, block_size, D) array of k's dtype, uint8 or int8
        uint8 pages hold e4m3 codes, int8 pages integer codes.
    slot_mapping : (T,) array of integers
        ``block_id * block_size + offset`` of each token; -1 skips it. Slots must be distinct.
    k_scale, v_scale : (K,) array of float32, optional
        Scales of quantized pages, positive and finite.

    Returns
    -------
    k_pages, v_pages : arrays like the arguments

    Examples
    --------
    >>> pages = jnp.zeros((1, 1, 16, 1))
    >>> k_pages, v_pages = kv_store(jnp.ones((1, 1, 1)), jnp.ones((1, 1, 1)), pages, pages,
    ...                             jnp.array([3]))
    >>> k_pages[0, 0, :5, 0]
    Array([0., 0., 0., 1., 0.], dtype=float32)
    """
    call = TraceContract("kv_store")
    k = call.array("k", k, "T K D", FLOATS)
    v = call.array("v", v, "T K D", k.dtype)
    pages = _checked_pages(call, k.dtype, k_pages, v_pages)
    slots = _as_pairs(call.integers("slot_mapping", slot_mapping, "T"))
    scales = _checked_scales(call, pages[0].dtype, k_scale, v_scale)
    k_pages, v_pages = _STORE(k, v, *pages, slots, *scales)
    return k_pages, v_pages


def _checked_pages(call: TraceContract, dtype: Any, k_pages: Any, v_pages: Any) -> list[Any]:
    k_pages = call.array("k_pages", k_pages, "P K block_size D", (dtype, *_CODES))
    v_pages = call.array("v_pages", v_pages, "P K block_size D", k_pages.dtype)
    size = call["block_size"]
    call.check("block_size", size in BLOCK_SIZES, f"one of {BLOCK_SIZES}", size)
    return [k_pages, v_pages]


def _checked_scales(call: TraceContract, dtype: Any, k_scale: Any, v_scale: Any) -> list[Any]:
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    is_quantized = dtype in _CODES
    for name, scale in scales.items():
        wanted = "an array with quantized pages" if is_quantized else "None with float pages"
        call.check(name, (scale is not None) == is_quantized, wanted, scale)
    return [None if s is None else call.array(n, s, "K", FLOAT32) for n, s in scales.items()]


def _as_pairs(values: Any) -> Any:
    """Return int32 values as int64, in pairs of int32: JAX has no int64 unless x64 is enabled."""
    return jnp.stack([values, values >> 31], axis=-1)
