"""Attention on a quantized KV cache: kernels against mirrors, mirrors against 16-bit pages."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.dtypes import KV_CODE_DTYPES
from engine.errors import ContractError, DTypeError, ShapeError
from engine.reference._quantized_kv import dequantize_kv
from engine.testing import cases
from engine.testing.cases_attention import (
    DECODE,
    DECODE_SINKS,
    PREFILL,
    PREFILL_SINKS,
    AttentionCase,
    as_codes,
    cu_seqlens,
    paged_cache,
)
from engine.testing.tolerances import assert_close

_PAGED = [case if case.block_size else replace(case, block_size=16) for case in PREFILL]
_MANY = AttentionCase((1,) * 70, tuple(range(0, 700, 10)), 8, 4, 128, block_size=16)
_CODED = [
    *DECODE,
    _MANY,
    replace(_MANY, head_dim=64),
    replace(_MANY, num_heads=16, num_kv_heads=1, window=33),
    replace(_MANY, num_heads=14, num_kv_heads=2, head_dim=64, block_size=64, softcap=5.0),
]


@pytest.fixture(params=KV_CODE_DTYPES)
def codes(request):
    """Code type under test."""
    return request.param


def _inputs(case, codes, seed=2):
    """Return quantized pages, their scales, block tables and lengths."""
    sizes = case.num_kv_heads, case.block_size, case.head_dim
    k, v, tables, lens = paged_cache(case.lens_k, *sizes, "float32", seed=seed)
    (k, k_scale), (v, v_scale) = as_codes(k, 5, codes), as_codes(v, 6, codes)
    return {
        "k_pages": k,
        "v_pages": v,
        "block_tables": tables,
        "context_lens": lens,
        "k_scale": k_scale,
        "v_scale": v_scale,
    }


def _queries(case, dtype):
    shape = (len(case.lens_q), case.lens_q[0], case.num_heads, case.head_dim)
    return cases.normal(shape, dtype, seed=1)


def _moved(xp, arrays):
    return {name: xp.asarray(array) for name, array in arrays.items()}


def _rule(xp, case):
    return case.rule | {"sinks": xp.asarray(case.head_sinks) if case.sinks else None}


@pytest.mark.grid("num_splits", [None, 3])
@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("case", [*_CODED, *DECODE_SINKS], ids=str)
def test_decode_matches_mirror(xp, case, dtype, num_splits, tier, codes):
    q, arrays = _queries(case, dtype), _inputs(case, codes)
    want, want_lse = reference.attention_decode(q, **arrays, **_rule(np, case), return_lse=True)
    out, buffer = cases.guarded(xp, want.shape, want.dtype)
    _, lse = kernels.attention_decode(
        xp.asarray(q),
        **_moved(xp, arrays),
        **_rule(xp, case),
        num_splits=num_splits,
        max_context_len=max(case.lens_k),
        out=out,
        return_lse=True,
    )
    assert_close(out, want, reduction=case.reduction)
    assert_close(lse, want_lse, reduction=case.reduction, name="lse")
    assert bool(xp.isnan(buffer[:64]).all()) and bool(xp.isnan(buffer[-64:]).all())


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("case", [*_PAGED, *PREFILL_SINKS], ids=str)
def test_prefill_matches_mirror(xp, case, dtype, tier, codes):
    case = case if case.block_size else replace(case, block_size=16)
    q = cases.normal((sum(case.lens_q), case.num_heads, case.head_dim), dtype, seed=1)
    arrays = _inputs(case, codes)
    arrays = {"k": arrays.pop("k_pages"), "v": arrays.pop("v_pages"), **arrays}
    arrays["cu_seqlens_q"] = cu_seqlens(case.lens_q)
    rule = _rule(np, case) | {"causal": case.causal}
    want, want_lse = reference.attention_prefill(q, **arrays, **rule, return_lse=True)
    rule = _rule(xp, case) | {"causal": case.causal}
    for num_splits in (None, 1):
        got, lse = kernels.attention_prefill(
            xp.asarray(q), **_moved(xp, arrays), **rule, num_splits=num_splits, return_lse=True
        )
        assert_close(got, want, reduction=case.reduction)
        assert_close(lse, want_lse, reduction=case.reduction, name="lse")


@pytest.mark.grid("num_queries", [1, 2, 4, 5, 8])
@pytest.mark.grid("head_dim", [64, 128])
def test_trees(xp, num_queries, head_dim, tier, codes):
    case = AttentionCase((num_queries,) * 3, (130, 64, 8), 8, 2, head_dim, block_size=16)
    rng = np.random.default_rng(3)
    masks = rng.integers(0, 2**num_queries, (3, num_queries)).astype(np.uint64)
    masks |= np.uint64(1) << np.arange(num_queries).astype(np.uint64)
    q, arrays = _queries(case, "bfloat16"), _inputs(case, codes)
    want = reference.attention_decode(q, **arrays, tree_mask=masks)
    got = kernels.attention_decode(xp.asarray(q), **_moved(xp, arrays), tree_mask=xp.asarray(masks))
    assert_close(got, want, reduction=case.reduction)


def _new_token_inputs(case, dtype, has_norm, codes):
    """Return the arguments, by name, with which attention_decode stores the newest token itself."""
    batch, d, heads = len(case.lens_k), case.head_dim, case.num_kv_heads
    arrays = _inputs(case, codes)
    lens, tables = arrays["context_lens"], arrays["block_tables"]
    slots = np.full(batch, -1, np.int64)
    for b, length in enumerate(lens):
        if length:
            size = case.block_size
            slots[b] = int(tables[b, (length - 1) // size]) * size + (length - 1) % size
    rng = np.random.default_rng(7)
    angles = rng.uniform(0, 6, (800, d // 2))
    arrays |= {
        "k": cases.normal((batch, 1, heads, d), dtype, seed=11),
        "v": cases.normal((batch, 1, heads, d), dtype, seed=12),
        "positions": np.maximum(lens - 1, 0).astype(np.int32),
        "cos_sin": np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32),
        "slot_mapping": slots,
    }
    if has_norm:
        arrays["q_weight"] = cases.normal((d,), dtype, seed=13)
        arrays["k_weight"] = cases.normal((d,), dtype, seed=14)
    return arrays


@pytest.mark.grid("has_norm", [False, True])
@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("head_dim", [64, 128, 80])
@pytest.mark.grid("batch", [1, 5, 20, 90])
def test_new_token_is_stored_and_read_as_a_code(xp, batch, head_dim, dtype, has_norm, tier, codes):
    lens = tuple(int(n) for n in np.random.default_rng(batch).integers(0, 700, batch))
    case = AttentionCase((1,) * batch, lens, 8, 2, head_dim, block_size=16)
    q, arrays = _queries(case, dtype), _new_token_inputs(case, dtype, has_norm, codes)
    moved = _moved(xp, arrays)
    want = reference.attention_decode(q, **arrays)
    got = kernels.attention_decode(xp.asarray(q), **moved, max_context_len=max(lens))
    for name in ("k_pages", "v_pages"):  # another summation order in the norm may move a code by 1
        apart = to_numpy(moved[name]).astype(int) - arrays[name].astype(int)
        assert abs(apart).max(initial=0) <= 1 and (apart != 0).mean() < 1e-3
    assert_close(got, want, reduction=case.reduction)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("batch", [3, 20, 40, 90])
def test_new_token_gives_the_bits_of_two_ops(xp, batch, dtype, head_dim, codes):
    lens = tuple(int(n) for n in np.random.default_rng(batch).integers(1, 700, batch))
    case = AttentionCase((1,) * batch, lens, 8, 2, head_dim, block_size=16)
    q, arrays = _queries(case, dtype), _new_token_inputs(case, dtype, True, codes)
    one, two = _moved(xp, arrays), _moved(xp, arrays)
    got = kernels.attention_decode(xp.asarray(q), **one, max_context_len=max(lens))
    rows = xp.asarray(q[:, 0])
    new = {name: two.pop(name) for name in ("k", "v", "positions", "cos_sin", "slot_mapping")}
    weights = {name: two.pop(name) for name in ("q_weight", "k_weight")}
    kernels.qk_norm_rope_store(
        rows,
        new["k"][:, 0],
        new["v"][:, 0],
        new["positions"],
        new["cos_sin"],
        two["k_pages"],
        two["v_pages"],
        new["slot_mapping"],
        **weights,
        k_scale=two["k_scale"],
        v_scale=two["v_scale"],
    )
    want = kernels.attention_decode(rows[:, None], **two, max_context_len=max(lens))
    np.testing.assert_array_equal(to_numpy(got), to_numpy(want))


def test_mirror_is_that_of_the_values(codes):
    """Dequantized float32 pages give the same result, so the op does nothing else differently."""
    case = AttentionCase((3, 3), (100, 40), 4, 2, 32, block_size=16)
    q, arrays = _queries(case, "float32"), _inputs(case, codes)
    want = reference.attention_decode(q, **arrays)
    scales = {name: arrays.pop(f"{name}_scale") for name in "kv"}
    for name in "kv":
        pages = arrays[f"{name}_pages"].transpose(1, 0, 2, 3)
        values = dequantize_kv(np.ascontiguousarray(pages), scales[name]).transpose(1, 0, 2, 3)
        arrays[f"{name}_pages"] = np.ascontiguousarray(values)
    np.testing.assert_array_equal(reference.attention_decode(q, **arrays), want)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_error_against_float_pages_is_bounded(head_dim, codes):
    """The error per value is at most 1/16 in e4m3, and half a scale (1/250 of the peak) in int8."""
    case = AttentionCase((1,) * 4, (500, 30, 200, 64), 8, 2, head_dim, block_size=16)
    q = _queries(case, "float32")
    k, v, tables, lens = paged_cache(case.lens_k, 2, 16, head_dim, "float32", seed=2)
    exact = reference.attention_decode(q, k, v, block_tables=tables, context_lens=lens)
    kind, low, high = KV_CODE_DTYPES[codes], *{"fp8": (0.001, 0.06), "int8": (0.001, 0.03)}[codes]
    scale = np.full(2, 6 / kind.largest, np.float32)
    stored_pages = []
    for pages in (k, v):
        stored = np.zeros(pages.shape, kind.dtype)
        rows = pages.transpose(0, 2, 1, 3).reshape(-1, 2, head_dim)
        slots = np.arange(len(rows))
        reference.kv_store(rows, rows, stored, stored, slots, k_scale=scale, v_scale=scale)
        stored_pages.append(stored)
    got = reference.attention_decode(
        q, *stored_pages, block_tables=tables, context_lens=lens, k_scale=scale, v_scale=scale
    )
    error = np.sqrt(np.mean((got - exact) ** 2) / np.mean(exact**2))
    assert low < error < high


_BAD = {
    "nan": np.array([1.0, np.nan], np.float32),
    "infinite": np.array([np.inf, 1.0], np.float32),
    "zero": np.array([0.0, 1.0], np.float32),
    "negative": np.array([1.0, -1.0], np.float32),
}


@pytest.mark.parametrize("which", ["k_scale", "v_scale"])
@pytest.mark.parametrize("bad", _BAD)
def test_bad_scales_are_refused_by_name(bad, which, codes):
    case = AttentionCase((1,), (20,), 4, 2, 16, block_size=16)
    q, arrays = _queries(case, "float32"), _inputs(case, codes)
    arrays[which] = _BAD[bad]
    with pytest.raises(ContractError, match=f"attention_decode: {which}: must be positive and fin"):
        kernels.attention_decode(q, **arrays)


def test_missing_and_superfluous_scales_are_refused(codes):
    case = AttentionCase((1,), (20,), 4, 2, 16, block_size=16)
    q, arrays = _queries(case, "float32"), _inputs(case, codes)
    with pytest.raises(ContractError, match="k_scale: must be an array"):
        kernels.attention_decode(q, **(arrays | {"k_scale": None}))
    with pytest.raises(ShapeError, match="v_scale"):
        kernels.attention_decode(q, **(arrays | {"v_scale": np.ones(3, np.float32)}))
    with pytest.raises(DTypeError, match="v_scale"):
        kernels.attention_decode(q, **(arrays | {"v_scale": np.ones(2)}))
    with pytest.raises(DTypeError, match=f"v_pages: must be {KV_CODE_DTYPES[codes].dtype}"):
        kernels.attention_decode(q, **(arrays | {"v_pages": np.zeros((3, 2, 16, 16), np.float32)}))
    pages = {name: np.zeros(arrays[name].shape, np.float32) for name in ("k_pages", "v_pages")}
    with pytest.raises(ContractError, match="k_scale: must be None with pages of float32"):
        kernels.attention_decode(q, **(arrays | pages))
    with pytest.raises(ContractError, match="v_scale: must be None without block_tables"):
        kernels.attention_prefill(
            q[0], q[0], q[0], cu_seqlens_q=np.array([0, 1], np.int32), v_scale=arrays["v_scale"]
        )
    pages = {
        "k": arrays["k_pages"],
        "v": arrays["v_pages"],
        **{name: arrays[name] for name in ("block_tables", "context_lens", "k_scale", "v_scale")},
    }
    with pytest.raises(ContractError, match="pattern: must be None with pages of codes"):
        kernels.attention_prefill(
            q[0], **pages, cu_seqlens_q=np.array([0, 1], np.int32), pattern=kernels.Periodic(8, 4)
        )
