"""Attention of the newest tokens over KV pages: `cuda_src/attention_decode/`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from engine import reference
from engine.dtypes import accumulation_dtype
from engine.kernels import _cpu
from engine.kernels._attention import (
    MAX_HEAD_DIM,
    Pages,
    ScoreRule,
    check_count,
    check_heads,
    checked_sinks,
    even_starts,
)
from engine.kernels._contract import MIRROR_FLOATS, Contract
from engine.kernels._module import ModuleSpec
from engine.kernels._new_tokens import NewTokens
from engine.kernels._quantize import GROUP
from engine.kernels.attention_decode import portable, sm90
from engine.kernels.attention_decode.portable import choose_num_splits, choose_tile
from engine.kernels.attention_prefill import few_tokens
from engine.kernels.attention_prefill import sm90 as prefill_sm90
from engine.kernels.attention_prefill.attention_prefill import launch as launch_prefill
from engine.kernels.qk_norm_rope_store import qk_norm_rope_store
from engine.kernels.quantize_rows import quantize_rows
from engine.kernels.quantize_rows import specs as quantize_specs
from engine.weights import FORMATS

__all__ = ["attention_decode", "choose_num_splits", "choose_tile", "specs"]

_TREE_BITS = 64  # bits per query's mask


def specs(
    dtype: str,
    *,
    head_dim: int | None = None,
    num_rows: int | None = None,
    kv_dtype: str = "",
    strided_tokens: bool = False,
    formats: tuple[str, ...] = (),
    deterministic: bool = False,
    **_: Any,
) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch, for one head dim and number of rows or for all.

    `num_rows` is Q * H / K; None means any. `kv_dtype` names the dtype of a quantized KV cache.
    `strided_tokens` selects the modules for pages in which a head's tokens are not adjacent; weight
    formats that multiply e4m3 codes with a scale per 128 columns add modules for `quantize_out`.
    `deterministic` adds those that fuse norm, rotation and store of new tokens with the order of
    sums of `attention_prefill`; its own modules are not included.
    """
    quantizes_out = any(
        FORMATS[name].activations == "fp8" and FORMATS[name].activation_group == GROUP
        for name in formats
    )
    dims = range(1, MAX_HEAD_DIM + 1) if head_dim is None else (head_dim,)
    rows = (1, 17) if num_rows is None else (num_rows,)
    tiles = dict.fromkeys(choose_tile(dtype, dim, n) for n in rows for dim in dims)
    any_chip = tuple(portable.spec(tile, dtype, kv_dtype) for tile in tiles)
    return (
        any_chip
        + sm90.specs(
            dtype,
            head_dim=head_dim,
            num_rows=num_rows,
            kv_dtype=kv_dtype,
            strided_tokens=strided_tokens,
            quantizes_out=quantizes_out,
        )
        + (quantize_specs(dtype) if quantizes_out else ())
        + (
            few_tokens.new_token_specs(dtype, head_dim=head_dim)
            if deterministic and not kv_dtype
            else ()
        )
    )


def attention_decode(
    q: Any,
    k_pages: Any,
    v_pages: Any,
    *,
    block_tables: Any,
    context_lens: Any,
    k: Any = None,
    v: Any = None,
    positions: Any = None,
    cos_sin: Any = None,
    slot_mapping: Any = None,
    q_weight: Any = None,
    k_weight: Any = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    chunk: int = 0,
    tree_mask: Any = None,
    sinks: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    num_splits: int | None = None,
    max_context_len: int | None = None,
    deterministic: bool = False,
    pdl: bool = False,
    out: Any = None,
    quantize_out: bool = False,
    return_lse: bool = False,
) -> Any:
    """Attend from the newest Q tokens of each sequence to its pages: softmax(scale Q Kᵀ) V.

    Parameters
    ----------
    q : (B, Q, H, D) array of float32, float16 or bfloat16 (NumPy: or float64)
        The last Q tokens of each sequence, D <= 512. A view whose last axis is contiguous is not
        copied.
    k_pages, v_pages : (P, K, block_size, D) arrays of q's dtype, uint8 or int8
        Layout and quantized pages: see `kv_store`. H is a multiple of K: query head h reads head
        h // (H // K). block_size is 16, 32, 64 or 128.
    block_tables : (B, NB) array of int32
        Ids of each sequence's pages. Entries beyond its length are never read.
    context_lens : (B,) array of int32
        Number of keys of each sequence, including the Q query tokens: query i sees keys 0 to
        len - Q + i.
    k, v : (B, 1, K, D) arrays of q's dtype, optional
        Keys and values of the newest tokens, for fused RoPE and KV append: `q` (Q = 1), `k` and
        `v` are outputs of the qkv projection, and the op first runs `qk_norm_rope_store` with the
        following arguments (norm of q and k, rotation of features i and i + R/2, k and v stored
        to the pages). On Hopper this is one kernel if D is 64 or 128, R = D, H / K <= 16 and all
        rows are 16-byte aligned; else two. `q` may be overwritten by the rotated queries.
    positions, cos_sin : (B,) array of int32, (P, R) array of float32, optional
        Required with `k`.
    slot_mapping : (B,) array of int64, optional
        Required with `k`. Slot of each token's k and v: the slot of its sequence's last key, in a
        page that no other sequence shares. -1 stores nothing.
    q_weight, k_weight : (D,) arrays of q's dtype, optional
    eps, weight_offset : float
    scale : float, optional
        Factor on the scores, by default D**-0.5.
    window : int
        Each query sees only its last `window` keys, including its own; 0 means no limit.
    softcap : float
        Replace a scaled score s by softcap * tanh(s / softcap); 0 means no cap.
    chunk : int
        Chunked attention: the query at position i sees only keys j with i // chunk == j // chunk;
        0 means no chunks. On a GPU a power of two. Requires Q = 1, and neither `window` nor
        `tree_mask`.
    tree_mask : (B, Q) array of uint64, optional
        Bit j of tree_mask[b, i], j <= i, tells whether query i sees query j (bits beyond i are
        ignored); every query sees the tokens before the Q queries. One call verifies a tree of
        drafts: parents come first, and each token has the bits of its ancestors and its own [2]_.
        Not combined with `window`; Q <= 64.
    sinks : (H,) array of float32 (float64 for float64), optional
        One extra logit per head that has no value: it adds exp(sink) to the softmax denominator of
        every query. `scale`, `softcap` and `window` do not apply to it; -inf means none.
    k_scale, v_scale : (K,) arrays of float32, optional
        Scales of a quantized KV cache, positive and finite: a key or value is code * scale. The
        newest tokens are read from the pages like all others.
    num_splits : int, optional
        Number of splits of each sequence's keys. If given, the split depends only on the
        sequence's own length, so the bits of its result do not depend on the rest of the batch. By
        default the keys are split so that all thread blocks are busy. Splits change only the
        rounding.
    max_context_len : int, optional
        Upper bound of `context_lens`, by default NB * block_size. It affects only the splits.
    deterministic : bool
        On a GPU, return the bits of `attention_prefill` with ``num_splits=1``, so that a token's
        result does not depend on whether it is decoded or part of a prompt; on the CPU without
        effect. Not combined with `num_splits`, `chunk`, `tree_mask` or `quantize_out`. Slower for
        few long sequences.
    pdl : bool
        Programmatic dependent launch (Hopper's kernel only): the kernel starts while the preceding
        one ends. It reads `block_tables` and `context_lens` early, and with `k` also `positions`,
        `slot_mapping`, `cos_sin`, weights, scales and the older keys: no kernel that still runs may
        write these. This holds after `qk_norm_rope_store`, which lets the next kernel start
        only once the kernels before it have ended.
    out : (B, Q, H, D) array of q's dtype, optional
        Array for the result; may be `q`.
    quantize_out : bool
        Return rows (token, all heads) quantized to e4m3 with a scale per 128 columns, as
        `quantize_rows` does, in place of `out`.
    return_lse : bool
        Also return the log-sum-exp.

    Returns
    -------
    out : (B, Q, H, D) array of q's dtype
        0 for a query that sees no key. With `quantize_out` codes (B, Q, H, D) of uint8, and scales
        (B, Q, ceil(H·D / 128)) of float32.
    lse : (B, Q, H) array of float32 (float64 for float64)
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
    multiplies V; splits are combined by their log-sum-exp in float32, in the order of the keys; the
    result is rounded once [1]_.

    References
    ----------
    .. [1] Dao, Haziza, Massa, Sizov: Flash-Decoding for long-context inference, 2023.
    .. [2] Miao et al.: SpecInfer, tree-based speculative inference and verification, 2023.

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
    return_lse = bool(return_lse)  # an array raises here, before anything is written
    quantize_out = bool(quantize_out)
    q = call.array("q", q, "B Q H D", MIRROR_FLOATS, layout="rows")
    pages = Pages.checked(
        call,
        {"k_pages": k_pages, "v_pages": v_pages},
        q.dtype,
        block_tables,
        context_lens,
        k_scale,
        v_scale,
    )
    check_heads(call)
    rule = ScoreRule.checked(call, call["D"], scale, window, softcap)
    rule = replace(rule, chunk=_checked_chunk(call, chunk, window))
    tree_mask = _checked_tree(call, tree_mask, rule.longest_reach)
    sinks = checked_sinks(call, sinks, accumulation_dtype(q.dtype))
    new_tokens = NewTokens.checked(
        call,
        q.dtype,
        k=k,
        v=v,
        positions=positions,
        cos_sin=cos_sin,
        slot_mapping=slot_mapping,
        q_weight=q_weight,
        k_weight=k_weight,
        eps=eps,
        weight_offset=weight_offset,
    )
    call.check("tree_mask", new_tokens is None or tree_mask is None, "None with k", "a mask")
    call.check("out", out is None or not quantize_out, "None with quantize_out", "an array")
    if deterministic:
        for name, given in (("num_splits", num_splits), ("tree_mask", tree_mask)):
            call.check(name, given is None, "None with deterministic", given)
        call.check("chunk", rule.chunk == 0, "0 with deterministic", rule.chunk)
        call.check("quantize_out", not quantize_out, "False with deterministic", quantize_out)
    num_splits, max_context_len = _checked_limits(call, num_splits, max_context_len)
    if call.on_cpu:
        if out is not None:  # check before the pages are written
            call.written("out", out, "B Q H D", q.dtype, layout="rows")
        if new_tokens is not None:
            for name, array in (("k_pages", pages.k), ("v_pages", pages.v)):
                call.written(name, array, "P K block_size D", array.dtype, layout="rows")
        result = _on_cpu(q, pages, rule, tree_mask, sinks, new_tokens, return_lse)
        result, *lses = result if return_lse else (result,)
        if quantize_out:
            return (*_quantized(reference.quantize_rows, result), *lses)
        out = call.finish(out, result, layout="rows")
        return (out, *lses) if lses else out
    lse = call.xp.empty(q.shape[:3], np.float32) if return_lse else None
    lses = () if lse is None else (lse,)
    limits = (num_splits, max_context_len)
    scales = None
    if not quantize_out:
        out = call.output("out", out, q.shape, q.dtype, layout="rows")
    if deterministic:
        _launch_in_order(q, pages, out, lse, rule, sinks, new_tokens, pdl)
        return (out, *lses) if lses else out
    if new_tokens is not None and not sm90.is_supported(
        q, pages, q if quantize_out else out, new_tokens
    ):
        _store(new_tokens, q, pages)
        new_tokens = None
        pdl = True
    if quantize_out:
        can_quantize = sm90.is_supported(q, pages, q, new_tokens)
        if can_quantize and sm90.can_quantize(q, pages, *limits, new_tokens):
            out = call.output("codes", None, q.shape, np.dtype(np.uint8))
            scales = call.output("scales", None, q.shape[:3], np.dtype(np.float32))
        else:
            out = call.output("out", None, q.shape, q.dtype)
    problem = (q, pages, out, lse, rule, *limits)
    extra = {"tree_mask": tree_mask, "sinks": sinks}
    if sm90.is_supported(q, pages, out):
        sm90.launch(*problem, **extra, pdl=pdl, new_tokens=new_tokens, scales=scales)
    else:
        portable.launch(*problem, **extra)
    if quantize_out:
        coded = _quantized(quantize_rows, out) if scales is None else (out, scales)
        return (*coded, *lses)
    return (out, *lses) if lses else out


def _launch_in_order(
    q: Any,
    pages: Pages,
    out: Any,
    lse: Any,
    rule: ScoreRule,
    sinks: Any,
    new_tokens: NewTokens | None,
    pdl: bool,
) -> None:
    """Launch the kernels of `attention_prefill` with one split."""
    (batch, queries) = q.shape[:2]
    if q.size == 0:
        return
    keys = {
        "k": pages.k,
        "v": pages.v,
        "cu_seqlens_q": even_starts(q.device.id, batch, queries),
        "cu_seqlens_k": None,
        "block_tables": pages.block_tables,
        "context_lens": pages.context_lens,
        "k_scale": pages.k_scale,
        "v_scale": pages.v_scale,
    }
    rows, outs = (x.reshape(batch * queries, *x.shape[2:]) for x in (q, out))
    lses = None if lse is None else lse.reshape(batch * queries, lse.shape[2])
    if new_tokens is not None:
        is_hopper = prefill_sm90.is_supported(rows, pages.k, pages.v, outs, None)
        if is_hopper and pages.k_scale is None and few_tokens.can_fuse(rows, new_tokens):
            tile = few_tokens.choose_tile(rows, keys, outs, queries)
            if tile is not None:
                fused: dict[str, Any] = {"is_early": pdl, "new_tokens": new_tokens}
                few_tokens.launch(rows, keys, outs, lses, True, rule, tile, sinks, **fused)
                return
        _store(new_tokens, q, pages)
        pdl = True
    options = {"num_splits": 1, "sinks": sinks, "pdl": pdl}
    launch_prefill(rows, keys, outs, lses, True, rule, queries, **options)
    if outs.data.ptr != out.data.ptr:  # a copy: no single stride leads from token to token of out
        out[...] = outs.reshape(out.shape)


def _store(new_tokens: NewTokens, q: Any, pages: Pages) -> None:
    """Rotate q (B, 1, H, D) in place and store keys and values; then `pdl` is always safe."""
    qk_norm_rope_store(
        q[:, 0],
        new_tokens.k[:, 0],
        new_tokens.v[:, 0],
        new_tokens.positions,
        new_tokens.cos_sin,
        pages.k,
        pages.v,
        new_tokens.slot_mapping,
        q_weight=new_tokens.q_weight,
        k_weight=new_tokens.k_weight,
        eps=new_tokens.eps,
        weight_offset=new_tokens.weight_offset,
        **pages.scales,
    )


def _quantized(quantize: Callable[..., Any], heads: Any) -> tuple[Any, Any]:
    """Return codes and scales of (B, Q, H, D), computed by `quantize`."""
    (batch, num_queries) = heads.shape[:2]
    width = heads.shape[2] * heads.shape[3]
    codes, scales = quantize(heads.reshape(batch * num_queries, width), group=GROUP)
    return codes.reshape(heads.shape), scales.reshape(batch, num_queries, scales.shape[1])


def _checked_limits(
    call: Contract, num_splits: int | None, max_context_len: int | None
) -> tuple[int | None, int]:
    """Check both; return `num_splits` and the upper bound of the lengths."""
    if num_splits is not None:
        num_splits = check_count(call, "num_splits", num_splits)
        call.check("num_splits", 1 <= num_splits <= 1024, "from 1 to 1024", num_splits)
    limit = call["NB"] * call["block_size"]
    if max_context_len is None:
        return num_splits, limit
    return num_splits, min(limit, check_count(call, "max_context_len", max_context_len))


def _on_cpu(
    q: Any,
    pages: Pages,
    rule: ScoreRule,
    tree_mask: Any,
    sinks: Any,
    new_tokens: NewTokens | None,
    return_lse: bool,
) -> Any:
    return _cpu.attention_decode(
        q,
        pages.k,
        pages.v,
        block_tables=pages.block_tables,
        context_lens=pages.context_lens,
        **({} if new_tokens is None else vars(new_tokens)),
        scale=rule.scale,
        window=rule.window,
        softcap=rule.softcap,
        chunk=rule.chunk,
        tree_mask=tree_mask,
        sinks=sinks,
        **pages.scales,
        return_lse=return_lse,
    )


def _checked_chunk(call: Contract, chunk: int, window: int) -> int:
    chunk = check_count(call, "chunk", chunk)
    if chunk:
        is_power = chunk & (chunk - 1) == 0
        call.check("chunk", call.on_cpu or is_power, "a power of two", chunk)
        call.check("chunk", window == 0, "0 with a window", chunk)
        call.check("Q", call["Q"] == 1, "1 with a chunk", call["Q"])
    return chunk


def _checked_tree(call: Contract, tree_mask: Any, reach: int) -> Any:
    """Return the checked `tree_mask`, or None."""
    if tree_mask is None:
        return None
    call.check("tree_mask", reach == 0, "None with a window or chunk", "a mask")
    call.check("Q", call["Q"] <= _TREE_BITS, f"at most {_TREE_BITS} with a tree_mask", call["Q"])
    return call.array("tree_mask", tree_mask, "B Q", np.dtype(np.uint64))
