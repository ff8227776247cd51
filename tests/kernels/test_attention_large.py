"""Attention over arrays of more than 2**31 elements, which need 64-bit offsets, and over more heads
and sequences than the second and third axis of a grid count: both tiers.

The CPU runs the same tests on small arrays, to verify the tests themselves.
"""

from __future__ import annotations

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.dtypes import np_dtype
from engine.kernels import _attention
from engine.testing import cases
from engine.testing.cases_attention import AttentionCase, cu_seqlens, paged_cache
from engine.testing.tolerances import assert_close

_HEADS, _KV_HEADS, _DIM, _SIZE = 32, 8, 128, 16
_NUM_QUERIES, _NUM_KEYS = 70, 300


def _needs(xp, gigabytes):
    if xp is not np and xp.cuda.Device().mem_info[0] < gigabytes << 30:
        pytest.skip(f"needs {gigabytes} GB of free device memory")


def _pool(xp, pages, tables):
    """Return a large pool of NaN with real pages at both ends, and matching block tables."""
    count, others = len(pages[0]), 140_000 if xp is not np else 50
    places = np.arange(count)
    places[1::2] += others  # every other page lies beyond 2**31 elements
    pools = []
    for values in pages:
        pool = xp.full((count + others, *values.shape[1:]), np.nan, values.dtype)
        pool[xp.asarray(places)] = xp.asarray(values)
        assert xp is np or pool[: others - 1].size > 2**31
        pools.append(pool)
    is_used = tables < count
    return *pools, np.where(is_used, places[np.where(is_used, tables, 0)], tables).astype(np.int32)


@pytest.mark.parametrize(("batch", "num_queries"), [(1, 1), (1, 4), (30, 1), (30, 8)])
def test_decode(xp, tier, batch, num_queries):
    _needs(xp, 12)
    case = AttentionCase((num_queries,) * batch, (_NUM_KEYS,) * batch, head_dim=_DIM)
    *pages, tables, lens = paged_cache(case.lens_k, _KV_HEADS, _SIZE, _DIM, "float16", seed=1)
    q = cases.normal((batch, num_queries, _HEADS, _DIM), "float16", seed=5)
    want = reference.attention_decode(q, *pages, block_tables=tables, context_lens=lens)
    *pools, tables = _pool(xp, pages, tables)
    where = {"block_tables": xp.asarray(tables), "context_lens": xp.asarray(lens)}
    got = kernels.attention_decode(xp.asarray(q), *pools, **where)
    assert_close(got, want, reduction=case.reduction)


def test_prefill_of_pages(xp, tier):
    _needs(xp, 12)
    case = AttentionCase((_NUM_QUERIES, 1), (_NUM_KEYS, 40), head_dim=_DIM)
    *pages, tables, lens = paged_cache(case.lens_k, _KV_HEADS, _SIZE, _DIM, "float16", seed=1)
    q = cases.normal((sum(case.lens_q), _HEADS, _DIM), "float16", seed=5)
    starts = cu_seqlens(case.lens_q)
    want = reference.attention_prefill(
        q, *pages, cu_seqlens_q=starts, block_tables=tables, context_lens=lens
    )
    *pools, tables = _pool(xp, pages, tables)
    where = {"block_tables": xp.asarray(tables), "context_lens": xp.asarray(lens)}
    got = kernels.attention_prefill(xp.asarray(q), *pools, cu_seqlens_q=xp.asarray(starts), **where)
    assert_close(got, want, reduction=case.reduction)


def _behind_others(xp, named):
    """Return views at the end of large arrays, and the starts of three sequences.

    The first has only queries and the second only keys, so neither computes anything.
    """
    others = (600_000, 2_200_000) if xp is not np else (50, 60)
    large = {}
    for name, values in named.items():
        before = others[values.shape[1] == _KV_HEADS]
        large[name] = xp.zeros((before + len(values), *values.shape[1:]), values.dtype)
        large[name][before:] = xp.asarray(values)
        assert xp is np or values.ndim < 3 or large[name][:before].size > 2**31
    starts = {
        "cu_seqlens_q": xp.asarray(cu_seqlens([others[0], 0, _NUM_QUERIES])),
        "cu_seqlens_k": xp.asarray(cu_seqlens([0, others[1], _NUM_KEYS])),
    }
    return large, starts


_STARTS = {"cu_seqlens_q": cu_seqlens([_NUM_QUERIES]), "cu_seqlens_k": cu_seqlens([_NUM_KEYS])}


def _dense():
    shapes = {"q": (_NUM_QUERIES, _HEADS, _DIM)} | dict.fromkeys("kv", (_NUM_KEYS, _KV_HEADS, _DIM))
    return {name: cases.normal(s, "bfloat16", i) for i, (name, s) in enumerate(shapes.items())}


def _check(got, want, reduction):
    assert_close(got[-len(want) :], want, reduction=reduction)
    assert not bool(got[: -len(want)].any())


def test_prefill(xp, tier):
    _needs(xp, 30)
    named = _dense()
    want = reference.attention_prefill(**named, **_STARTS)
    large, starts = _behind_others(xp, named)
    _check(kernels.attention_prefill(**large, **starts), want, _NUM_KEYS)


def test_prefill_fp8(xp, tier):
    _needs(xp, 20)
    codes, scales = {}, {}
    for name, x in _dense().items():
        codes[name], scales[f"{name}_scale"] = reference.quantize_heads(x)
    want = reference.attention_prefill_fp8(**codes, **scales, **_STARTS).astype(np.float64)
    large, starts = _behind_others(xp, codes)
    scales = {name: xp.asarray(x) for name, x in scales.items()}
    got = kernels.attention_prefill_fp8(**large, **scales, **starts)
    error = np.linalg.norm(to_numpy(got[-_NUM_QUERIES:]).astype(np.float64) - want)
    assert error <= 0.05 * np.linalg.norm(want)  # as in test_attention_prefill_fp8
    assert not bool(got[:-_NUM_QUERIES].any())


def test_backward(xp, tier):
    _needs(xp, 70)
    named = _dense() | {"dout": cases.normal((_NUM_QUERIES, _HEADS, _DIM), "bfloat16", 7)}
    q, k, v = (named[name] for name in "qkv")
    named["out"], named["lse"] = reference.attention_prefill(q, k, v, **_STARTS, return_lse=True)
    wants = reference.attention_backward(**named, **_STARTS)
    large, starts = _behind_others(xp, named)
    large["lse"][:-_NUM_QUERIES] = -np.inf
    assert large["out"].dtype == np_dtype("bfloat16")
    group = _HEADS // _KV_HEADS
    for deterministic in (True, False):
        got = kernels.attention_backward(**large, **starts, deterministic=deterministic)
        for x, want in zip(got, wants, strict=True):
            _check(x, want, 3 * _DIM + max(_NUM_KEYS, group * _NUM_QUERIES))


def test_parts_of_a_grid_cover_the_problem_once(monkeypatch):
    monkeypatch.setattr(_attention, "MAX_GRID_Y", 7)
    num_kv_heads, group, batch = 8, 3, 17
    starts = np.arange(batch + 1)
    arrays = {
        "q": np.zeros((batch, num_kv_heads * group, 4)),
        "dk": np.zeros((batch, num_kv_heads)),
    }
    arrays |= {"cu_seqlens_q": starts, "context_lens": starts[1:], "sinks": None}
    parts = list(_attention.grid_parts(arrays, num_kv_heads, group, batch))
    for heads, sequences, views in parts:
        assert heads * group <= 7 and sequences <= 7 and views["sinks"] is None
        begin, *_, end = views["cu_seqlens_q"]
        assert end - begin == sequences
        np.testing.assert_array_equal(views["context_lens"], np.arange(begin, end) + 1)
        views["q"][begin:end] += 1
        views["dk"][begin:end] += 1
        assert views["q"].shape[1] == heads * group and views["dk"].shape[1] == heads
    assert len(parts) == 4 * 3 and (arrays["q"] == 1).all() and (arrays["dk"] == 1).all()
    ((*counts, views),) = _attention.grid_parts(arrays, 2, group, 7)
    assert counts == [2, 7] and views is arrays


def _tokens(num_tokens, num_heads, dtype):
    shape = (num_tokens, num_heads, 64)
    return [cases.normal(shape, dtype, seed) for seed in range(4)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_many_heads(xp, tier, dtype):
    """A batch (B, H, S, D) of another framework is one sequence with B * H heads."""
    _needs(xp, 8)
    num_heads = 65_540 if xp is not np else 40
    # Small integers: among millions of sums some cancel, and those are exact.
    dout, q, k, v = (np.rint(x) for x in _tokens(2, num_heads, dtype))
    lens = xp.asarray(cu_seqlens([2]))
    where = {"cu_seqlens_q": lens, "cu_seqlens_k": lens}
    on_cpu = {name: cu_seqlens([2]) for name in where}
    want, lse = reference.attention_prefill(q, k, v, **on_cpu, return_lse=True)
    wanted = reference.attention_backward(dout, q, k, v, want, lse, **on_cpu)
    dout, q, k, v = (xp.asarray(x) for x in (dout, q, k, v))
    out, lse = kernels.attention_prefill(q, k, v, **where, return_lse=True)
    assert_close(out, want, reduction=64)
    grads = kernels.attention_backward(dout, q, k, v, xp.asarray(want), lse, **where)
    for name, got, gradient in zip(("dq", "dk", "dv"), grads, wanted, strict=True):
        assert_close(got, gradient, reduction=3 * 64, name=name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_many_sequences(xp, tier, dtype):
    """Sequences of one token: the result is v, and only v has a gradient."""
    _needs(xp, 8)
    count = 65_540 if xp is not np else 40
    dout, q, k, v = (xp.asarray(x) for x in _tokens(count, 1, dtype))
    lens = xp.asarray(np.arange(count + 1, dtype=np.int32))
    where = {"cu_seqlens_q": lens, "cu_seqlens_k": lens, "max_seqlen_q": 1}
    out, lse = kernels.attention_prefill(q, k, v, **where, return_lse=True)
    assert bool((out == v).all())
    dq, dk, dv = kernels.attention_backward(dout, q, k, v, out, lse, **where, max_seqlen_k=1)
    assert_close(dv, to_numpy(dout), reduction=1, name="dv")
    assert all(bool((abs(x) < 1e-4).all()) for x in (dq, dk))
