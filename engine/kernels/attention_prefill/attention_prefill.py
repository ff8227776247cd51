"""Attention over whole sequences or chunks: `cuda_src/attention_prefill/`."""

from __future__ import annotations

from typing import Any

from engine import reference
from engine.dtypes import accumulation_dtype, dtype_name
from engine.kernels import _attention_pattern
from engine.kernels._attention import (
    MAX_HEAD_DIM,
    Pages,
    ScoreRule,
    Tile,
    are_aligned,
    check_count,
    check_heads,
    checked_longest,
    checked_sinks,
    checked_starts,
    grid_parts,
)
from engine.kernels._contract import MIRROR_FLOATS, Contract
from engine.kernels._elementwise import element_strides, named_strides
from engine.kernels._launch import Kernel, ceil_div
from engine.kernels._module import ModuleSpec
from engine.kernels._quantized_kv import kv_dtype_of, kv_macros
from engine.kernels.attention_prefill import few_tokens, sm90

__all__ = ["attention_prefill", "choose_tile", "launch", "specs"]

_PARAMS = (
    "q:ptr k:ptr v:ptr cu_seqlens_q:ptr cu_seqlens_k:ptr block_tables:ptr context_lens:ptr "
    "sinks:ptr out:ptr lse:ptr q_stride_t:i64 q_stride_h:i64 k_stride_t:i64 k_stride_h:i64 "
    "v_stride_t:i64 v_stride_h:i64 page_stride:i64 table_stride:i64 out_stride_t:i64 "
    "out_stride_h:i64 max_keys:i64 total_q:i32 num_heads:i32 group:i32 head_dim:i32 "
    "value_dim:i32 block_shift:i32 num_blocks:i32 causal:i32 window:i32 is_vector:i32 "
    "score_inner:f32 score_factor:f32"
)
_FILE = "attention_prefill/attention_prefill.cu"
_KERNEL = Kernel(
    "attention_prefill",
    _PARAMS + _attention_pattern.PARAMS + " k_scale:ptr v_scale:ptr",
    struct="AttentionPrefillParams",
)

# Up to D = 128, four warps of 32 rows hold O in half of their registers; with D = 256, 16 rows take
# all of them, and with D = 512 two warps share the columns. Keys and stages fill the shared memory
# of the smallest chips (99 KiB).
_TILES_16 = (
    Tile(64, warps_m=4, warps_n=1, row_tiles=2, keys=64, stages=2),
    Tile(96, warps_m=4, warps_n=1, row_tiles=2, keys=32, stages=3),
    Tile(128, warps_m=4, warps_n=1, row_tiles=2, keys=32, stages=3),
    Tile(256, warps_m=4, warps_n=1, row_tiles=1, keys=32, stages=2),
    Tile(512, warps_m=2, warps_n=1, row_tiles=1, keys=16, stages=2, column_warps=2),
)
_TILES_32 = (
    Tile(128, warps_m=4, warps_n=1, row_tiles=4, keys=32, stages=1),
    Tile(256, warps_m=4, warps_n=1, row_tiles=4, keys=32, stages=1),
    Tile(512, warps_m=4, warps_n=1, row_tiles=4, keys=32, stages=1),
)


def choose_tile(dtype: str, head_dim: int) -> Tile:
    """Choose the tile with the least padding for heads of `head_dim`.

    Examples
    --------
    >>> choose_tile("bfloat16", 80).head_dim
    96
    """
    tiles = _TILES_32 if dtype == "float32" else _TILES_16
    return next(tile for tile in tiles if head_dim <= tile.head_dim)


def specs(
    dtype: str,
    *,
    head_dim: int | None = None,
    patterns: bool = False,
    kv_dtype: str = "",
    deterministic: bool = False,
    **_: Any,
) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch, for one head dim or all.

    `patterns` adds the modules for patterns, `deterministic` those for few rows with
    ``num_splits=1``. `kv_dtype` selects those for a quantized KV cache instead.
    """
    dims = range(1, MAX_HEAD_DIM + 1) if head_dim is None else (head_dim,)
    tiles = dict.fromkeys(choose_tile(dtype, dim) for dim in dims)
    kinds = (0, 1) if patterns and not kv_dtype else (0,)
    portable = tuple(_spec(tile, dtype, kind, kv_dtype) for kind in kinds for tile in tiles)
    hopper = sm90.specs(
        dtype,
        head_dim=head_dim,
        patterns=patterns,
        kv_dtype=kv_dtype,
        deterministic=deterministic,
    )
    few = few_tokens.specs(dtype, head_dim=head_dim) if deterministic and not kv_dtype else ()
    return portable + hopper + few


def _spec(tile: Tile, dtype: str, is_patterned: int, kv_dtype: str) -> ModuleSpec:
    return tile.spec(_FILE, dtype, PATTERN=is_patterned, **kv_macros(kv_dtype))


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
    pattern: _attention_pattern.Pattern | None = None,
    sinks: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    max_seqlen_q: int | None = None,
    num_splits: int | None = None,
    pdl: bool = False,
    out: Any = None,
    return_lse: bool = False,
    lse_out: Any = None,
) -> Any:
    """Attend from the last tokens of each sequence to its keys: softmax(scale Q Kᵀ) V.

    Parameters
    ----------
    q : (Tq, H, D) array of float32, float16 or bfloat16 (NumPy: or float64)
        Query tokens of all sequences, concatenated. D <= 512. A view whose last axis is contiguous,
        such as the heads of a fused qkv row, is not copied.
    k : (Tk, K, D) or (P, K, block_size, D) array of q's dtype
        Dense keys (views as for `q`), or pages (layout and quantized pages: see `kv_store`). H is a
        multiple of K: query head h reads head h // (H // K). block_size is 16, 32, 64 or 128.
    v : (Tk, K, V) or (P, K, block_size, D) array of q's dtype
        Dense values, which may be narrower than keys (V <= D), or pages; V is then D.
    cu_seqlens_q : (B+1,) array of int32
        Sequence b's queries are ``q[cu_seqlens_q[b]:cu_seqlens_q[b + 1]]``; rises from 0 to Tq.
    cu_seqlens_k : (B+1,) array of int32, optional
        Required with dense `k` and `v`, for their rows; not combined with `block_tables`.
    block_tables : (B, NB) array of int32, optional
        Required with pages. Ids of each sequence's pages. Entries beyond its length are never read.
    context_lens : (B,) array of int32, optional
        Required with pages. Number of keys of each sequence, including the query tokens' keys.
    causal : bool
        Query i of n sees keys 0 to len - n + i. Otherwise every query sees all keys.
    scale : float, optional
        Factor on the scores, by default D**-0.5.
    window : int
        Each query sees only its last `window` keys, including its own; 0 means no limit. Requires
        `causal`.
    softcap : float
        Replace a scaled score s by softcap * tanh(s / softcap); 0 means no cap.
    pattern : BlockSparse or Periodic, optional
        Further restricts the keys that each query sees by its position: the position of the last
        key it sees if `causal`, else its index among the sequence's queries. Key tiles hidden from
        a whole query tile are not read, and no element-wise mask is materialised. Not supported
        with a quantized KV cache.
    sinks : (H,) array of float32 (float64 for float64), optional
        One extra logit per head that has no value: it adds exp(sink) to the softmax denominator of
        every query. `scale`, `softcap`, `window` and `pattern` do not apply to it; -inf means none.
    k_scale, v_scale : (K,) arrays of float32, optional
        Scales of a quantized KV cache, positive and finite: a key or value is code * scale. New
        tokens are read from the pages like all others, so a token's result does not depend on how
        its prompt is split into chunks.
    max_seqlen_q : int, optional
        Upper bound of the queries per sequence. If omitted on CUDA, computing it synchronises.
    num_splits : int, optional
        Maximum number of blocks that share the keys of a token, by default enough to fill the
        device. With 1, the bits of a token's result do not depend on the other tokens of the call.
    pdl : bool
        Programmatic dependent launch (Hopper's kernel for few tokens, with 1 split): it reads
        `cu_seqlens_q`, `cu_seqlens_k`, `block_tables`, `context_lens` and the keys and values of
        earlier tokens while the preceding kernel ends; no kernel that still runs may write these.
        See `attention_decode`.
    out : (Tq, H, V) array of q's dtype, optional
        Array for the result; may be `q`.
    return_lse : bool
        Also return the log-sum-exp.
    lse_out : (Tq, H) array of float32 (float64 for float64), optional
        Array for the log-sum-exp.

    Returns
    -------
    out : (Tq, H, V) array of q's dtype
        0 for a query that sees no key.
    lse : (Tq, H) array of float32 (float64 for float64)
        Natural logarithm of the sum of exp(score), including exp(sink); -inf for a query without
        keys and sink. For `merge_states`, pass the sinks to exactly one of the parts.

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
    return_lse = bool(return_lse)  # an array raises here, before anything is written
    q = call.array("q", q, "Tq H D", MIRROR_FLOATS, layout="rows")
    statistic = accumulation_dtype(q.dtype)
    keys = _check_keys(
        call,
        *(q, k, v, cu_seqlens_q, cu_seqlens_k, block_tables, context_lens, k_scale, v_scale),
    )
    check_heads(call)
    rule = ScoreRule.checked(call, call["D"], scale, window, softcap)
    call.check("window", causal or not window, "0 unless causal", window)
    _attention_pattern.check(call, pattern)
    has_pattern_of_codes = pattern is not None and k_scale is not None
    call.check("pattern", not has_pattern_of_codes, "None with pages of codes", pattern)
    sinks = checked_sinks(call, sinks, statistic)
    call.check("lse_out", lse_out is None or return_lse, "None without return_lse", lse_out)
    max_q = checked_longest(call, "max_seqlen_q", max_seqlen_q, keys["cu_seqlens_q"])
    if num_splits is not None:
        num_splits = check_count(call, "num_splits", num_splits)
        call.check("num_splits", num_splits > 0, "1 or more", num_splits)
    if call.on_cpu:
        result = reference.attention_prefill(
            q,
            **keys,
            causal=causal,
            scale=rule.scale,
            window=rule.window,
            softcap=rule.softcap,
            pattern=pattern,
            sinks=sinks,
            return_lse=True,
        )
        targets = (
            call.target(out, result[0], layout="rows"),
            call.target(lse_out, result[1], "lse_out"),
        )
        out, lse = (call.fill(*pair) for pair in zip(targets, result, strict=True))
        return (out, lse) if return_lse else out
    shape = (*q.shape[:2], keys["v"].shape[-1])
    out = call.output("out", out, shape, q.dtype, layout="rows")
    lse = call.output("lse_out", lse_out, q.shape[:2], statistic) if return_lse else None
    options = {"num_splits": num_splits, "pattern": pattern, "sinks": sinks, "pdl": pdl}
    launch(q, keys, out, lse, causal, rule, max_q, **options)
    return out if lse is None else (out, lse)


def launch(
    q: Any,
    keys: dict[str, Any],
    out: Any,
    lse: Any,
    causal: bool,
    rule: ScoreRule,
    max_q: int,
    *,
    num_splits: int | None = None,
    pattern: Any = None,
    sinks: Any = None,
    pdl: bool = False,
) -> None:
    """Launch on checked CuPy arrays; `keys` are those of `attention_prefill` by name."""
    is_hopper = sm90.is_supported(q, keys["k"], keys["v"], out, pattern)
    chosen = None
    if is_hopper and num_splits == 1 and pattern is None and keys["k_scale"] is None:
        chosen = few_tokens.choose_tile(q, keys, out, max_q)
    if chosen is not None:
        few_tokens.launch(q, keys, out, lse, causal, rule, chosen, sinks, is_early=pdl)
    elif is_hopper:
        sm90.launch(q, keys, out, lse, causal, rule, max_q, num_splits, pattern, sinks)
    else:
        _launch(q, keys, out, lse, causal, rule, max_q, pattern, sinks)


def _check_keys(
    call: Contract,
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    block_tables: Any,
    context_lens: Any,
    k_scale: Any,
    v_scale: Any,
) -> dict[str, Any]:
    """Check keys and values, dense or in pages, and the sequences; return them by name."""
    cu_seqlens_q = checked_starts(call, "cu_seqlens_q", cu_seqlens_q, q.shape[0])
    if block_tables is not None:
        call.check("cu_seqlens_k", cu_seqlens_k is None, "None with block_tables", cu_seqlens_k)
        pages = Pages.checked(
            call, {"k": k, "v": v}, q.dtype, block_tables, context_lens, k_scale, v_scale
        )
        k_scale = pages.k_scale
        v_scale = pages.v_scale
        k = pages.k
        v = pages.v
        block_tables = pages.block_tables
        context_lens = pages.context_lens
        wanted = f"of length B+1 = {call['B'] + 1}, with B from block_tables"
        call.check("cu_seqlens_q", call["B+1"] == call["B"] + 1, wanted, call["B+1"])
    else:
        given = {"context_lens": context_lens, "k_scale": k_scale, "v_scale": v_scale}
        for name, value in given.items():
            call.check(name, value is None, "None without block_tables", value)
        k = call.array("k", k, "Tk K D", q.dtype, layout="rows")
        v = call.array("v", v, "Tk K V", q.dtype, layout="rows")
        call.check("V", 0 < call["V"] <= call["D"], f"from 1 to D = {call['D']}", call["V"])
        cu_seqlens_k = checked_starts(call, "cu_seqlens_k", cu_seqlens_k, k.shape[0])
    return {
        "k": k,
        "v": v,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "block_tables": block_tables,
        "context_lens": context_lens,
        "k_scale": k_scale,
        "v_scale": v_scale,
    }


def _launch(
    q: Any,
    keys: dict[str, Any],
    out: Any,
    lse: Any,
    causal: bool,
    rule: ScoreRule,
    max_q: int,
    pattern: _attention_pattern.Pattern | None,
    sinks: Any,
) -> None:
    (total_q, num_heads, head_dim) = q.shape
    dtype = dtype_name(q.dtype)
    tile = choose_tile(dtype, head_dim)
    k = keys["k"]
    v = keys["v"]
    tables = keys["block_tables"]
    is_paged = tables is not None
    num_kv_heads = k.shape[1]
    k_strides = element_strides(k)
    v_strides = element_strides(v)
    group = num_heads // num_kv_heads
    num_tiles = ceil_div(min(max_q, total_q) * group, tile.rows(dtype))
    numbers = {
        **named_strides("th", q=q, out=out),
        "k_stride_t": k_strides[2 if is_paged else 0],
        "k_stride_h": k_strides[1],
        "v_stride_t": v_strides[2 if is_paged else 0],
        "v_stride_h": v_strides[1],
        "page_stride": k_strides[0] if is_paged else 0,
        "table_stride": element_strides(tables)[0] if is_paged else 0,
        "max_keys": (tables.shape[1] * k.shape[2] if k.size else 0) if is_paged else k.shape[0],
        "total_q": total_q,
        "num_heads": num_heads,
        "group": group,
        "head_dim": head_dim,
        "value_dim": v.shape[-1],
        "block_shift": k.shape[2].bit_length() - 1 if is_paged else 0,
        "num_blocks": k.shape[0] if is_paged else 0,
        "causal": int(causal),
        "window": rule.window,
        "is_vector": int(are_aligned(q, k, v, out)),
        "score_inner": rule.inner,
        "score_factor": rule.factor,
        **_attention_pattern.arguments(pattern),
    }
    arrays = {"q": q, **keys, "sinks": sinks, "out": out, "lse": lse}
    batch = keys["cu_seqlens_q"].size - 1
    for *grid, views in grid_parts(arrays, num_kv_heads, group, batch):
        _KERNEL.launch(
            _spec(tile, dtype, int(pattern is not None), kv_dtype_of(k.dtype)),
            (num_tiles, *grid),
            (tile.threads,),
            tile.shared_bytes(dtype),
            **views,
            **numbers,
        )
