"""attention_prefill on Hopper: supported problems, compilation, and hard inputs against float64."""

from __future__ import annotations

import heapq
import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from engine import kernels
from engine.device import to_numpy
from engine.errors import CompileError
from engine.kernels import _nvrtc
from engine.kernels._attention import are_aligned, are_tensor_map_rows
from engine.kernels._module import compile_module
from engine.kernels.attention_prefill import few_tokens
from engine.kernels.attention_prefill import sm90 as prefill_sm90
from engine.kernels.attention_prefill import work as prefill_work
from engine.kernels.attention_prefill.few_tokens import FewTokensTile
from engine.kernels.attention_prefill.sm90 import choose_hopper_tile, specs
from engine.kernels.attention_prefill.work import choose_cut, choose_num_splits, cut_into_tiles
from engine.testing import cases
from engine.testing.cases_attention import AttentionCase, as_codes, cu_seqlens, paged_cache

_HALVES = ("float16", "bfloat16")
_ERROR = {"float16": 6e-4, "bfloat16": 4.5e-3}  # relative (norm): rounding of P, V, result


def test_tiles():
    assert choose_hopper_tile("float32", 64) is None
    assert choose_hopper_tile("float16", 36) is None  # rows are not 16-byte aligned
    assert choose_hopper_tile("float16", 32) is None  # would waste half of every MMA
    for head_dim, value_dim in itertools.product(range(40, 257, 8), range(8, 257, 8)):
        if value_dim > head_dim:
            continue
        tile = choose_hopper_tile("bfloat16", head_dim, value_dim=value_dim)
        assert tile.head_dim >= head_dim and tile.value_dim >= value_dim
        assert tile.shared_bytes <= 227 * 1024
        assert tile.spec("bfloat16") in specs("bfloat16", head_dim=head_dim)
        # a TMA box lies in one page; each lane issues at most one box
        for size in (16, 32, 64, 128):
            box = prefill_sm90._box_keys(size, tile)
            assert size % box == 0 and tile.keys % box == 0 and tile.keys <= 32 * box


def test_tiles_for_few_rows():
    """They sum in the order of the others' tiles: of as many keys, and the same padding."""
    for kv_dtype in ("", "fp8", "int8"):
        for head_dim in range(40, 257, 8):
            tile = choose_hopper_tile("bfloat16", head_dim, kv_dtype=kv_dtype)
            if tile is None:
                continue
            for is_alone in (False, True):
                few = tile.few_rows(is_alone=is_alone)
                assert (few.keys, few.head_dim, few.value_dim) == (
                    tile.keys,
                    tile.head_dim,
                    tile.value_dim,
                )
                assert few.rows == 16 and few.blocks * (few.shared_bytes + 1024) <= 228 * 1024
                known = specs("bfloat16", head_dim=head_dim, kv_dtype=kv_dtype, deterministic=True)
                assert few.spec("bfloat16") in known or (is_alone and not kv_dtype)


def test_splits_fill_the_device_and_no_more():
    for tiles in (1, 5, 16, 66, 67, 132, 1000):
        for key_tiles in (1, 7, 64, 1000):
            splits = choose_num_splits(tiles, key_tiles, 132)
            assert splits == 1 or (tiles * splits <= 132 and 4 * splits <= key_tiles)


def test_a_cut_covers_all_tokens_and_ends_no_later():
    rng = np.random.default_rng(0)
    for _ in range(300):
        consumers, group = int(rng.integers(2, 4)), int(rng.integers(1, 129))
        tile_tokens, pairs = 64 * consumers // group, int(rng.integers(1, 200))
        tokens = int(rng.integers(1, 60 * tile_tokens))
        long_tiles, short_tokens = choose_cut(tokens, tile_tokens, pairs, consumers, 132)
        uncut = -(-tokens // tile_tokens)
        rest = tokens - long_tiles * tile_tokens
        assert 0 <= long_tiles <= uncut and 0 < short_tokens <= tile_tokens
        assert (rest <= 0) == (long_tiles == uncut)
        warpgroups = -(-short_tokens * group // 64)  # warpgroups with rows of a short tile
        cost = prefill_work._TILE_COST
        share = (warpgroups + cost) / (consumers + cost)
        short = pairs * max(0, -(-rest // short_tokens))
        rounds = prefill_work._rounds(pairs * long_tiles, short, share, 132)
        work = cut_into_tiles(tokens, tile_tokens, pairs, 1, (long_tiles, short_tokens))
        assert work["total"] == pairs * min(long_tiles, uncut) + short
        assert rounds <= prefill_work._rounds(pairs * uncut, 0, 1.0, 132)


def test_rounds():
    assert prefill_work._rounds(265, 0, 0.5, 132) == 3
    assert prefill_work._rounds(264, 1, 0.5, 132) == 2.5
    assert prefill_work._rounds(133, 131 + 131, 0.5, 132) == 2
    rng = np.random.default_rng(1)
    for _ in range(500):
        sm_count, long, short = (int(rng.integers(a, b)) for a, b in ((1, 20), (0, 60), (0, 90)))
        share = float(rng.choice([0.535, 0.697, 0.767, 0.5, 1 / 3]))
        ends = [0.0] * sm_count
        for task in [1.0] * long + [share] * short:
            heapq.heapreplace(ends, ends[0] + task)
        got = prefill_work._rounds(long, short, share, sm_count)
        np.testing.assert_allclose(got, max(ends), rtol=1e-9)


def test_sections_are_equal_and_fit():
    for pairs in (0, 1, 23, 24, 25, 32, 1000):
        section = prefill_work.choose_section(pairs, 1 << 20)
        assert section <= 24 and section * 24 >= min(pairs, 24)
        assert pairs == 0 or -(-pairs // section) == -(-pairs // 24)
    assert prefill_work.choose_section(5, 1 << 40) == 1


@pytest.mark.parametrize("dtype", _HALVES)
def test_compiles_without_spills_or_serialised_products(dtype):
    try:
        _nvrtc.version()
    except CompileError as error:
        pytest.skip(str(error))
    for spec in specs(dtype):
        compiled = compile_module(spec, "sm_90a")
        assert not any(entry.spill_bytes or entry.stack_bytes for entry in compiled.entries)
        assert "serialized" not in compiled.log and "C7508" not in compiled.log


def _float64(q, k, v, case):
    """softmax(Q K^T) V of one sequence in float64, all rows at once."""
    (n, heads, head_dim), m = q.shape, len(k)
    group = heads // case.num_kv_heads
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    scores = np.einsum("ihd,jhd->hij", q, np.repeat(k, group, 1)) * head_dim**-0.5
    if case.softcap:
        scores = case.softcap * np.tanh(scores / case.softcap)
    last = np.arange(n)[:, None] + m - n if case.causal else np.full((n, 1), m - 1)
    keys = np.arange(m)[None]
    hidden = (keys > last) | (keys <= last - case.window if case.window else False)
    scores[:, hidden] = -np.inf
    if m == 0:
        return np.zeros((n, heads, head_dim)), np.full((n, heads), -np.inf)
    high = np.maximum(scores.max(-1, keepdims=True), -1e300)
    p = np.exp(scores - high)
    total = p.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (high + np.log(total))[..., 0].T
    weights = np.divide(p, total, out=np.zeros_like(p), where=total > 0)
    return np.einsum("hij,jhd->ihd", weights, np.repeat(v, group, 1)), lse


def _run(cp, case, dtype, *, seed=0, num_splits=None):
    """Return the result and log-sum-exp, and both in float64; unused pages hold NaN."""
    q = cases.normal((sum(case.lens_q), case.num_heads, case.head_dim), dtype, seed)
    where = {"cu_seqlens_q": cu_seqlens(case.lens_q)}
    if case.block_size:
        sizes = case.num_kv_heads, case.block_size, case.head_dim
        k, v, tables, lens = paged_cache(case.lens_k, *sizes, dtype, seed + 1)
        where |= {"block_tables": tables, "context_lens": lens}
    else:
        shape = (sum(case.lens_k), case.num_kv_heads, case.head_dim)
        k, v = cases.normal(shape, dtype, seed + 1), cases.normal(shape, dtype, seed + 2)
        where["cu_seqlens_k"] = cu_seqlens(case.lens_k)
    device_q, device_k, device_v = cases.to_module(cp, q, k, v)
    out, guards = cases.guarded(cp, q.shape, q.dtype)
    assert prefill_sm90.is_supported(device_q, device_k, device_v, out) or not _is_hopper()
    got, lse = kernels.attention_prefill(
        device_q,
        device_k,
        device_v,
        **{name: cp.asarray(value) for name, value in where.items()},
        causal=case.causal,
        window=case.window,
        softcap=case.softcap,
        num_splits=num_splits,
        out=out,
        return_lse=True,
    )
    assert bool(cp.isnan(guards[:64]).all()) and bool(cp.isnan(guards[-64:]).all())
    wants = []
    for b, length in enumerate(case.lens_k):
        rows = slice(*where["cu_seqlens_q"][b : b + 2])
        if case.block_size:
            blocks = where["block_tables"][b, : -(-length // case.block_size)]
            keys, values = (
                x[blocks].transpose(0, 2, 1, 3).reshape(-1, *x.shape[1::2])[:length] for x in (k, v)
            )
        else:
            keys, values = (x[slice(*where["cu_seqlens_k"][b : b + 2])] for x in (k, v))
        wants.append(_float64(q[rows], keys, values, case))
    want, want_lse = (np.concatenate(parts) for parts in zip(*wants, strict=True))
    return to_numpy(got).astype(np.float64), to_numpy(lse), want, want_lse


def _is_hopper():
    from engine.kernels._module import current_architecture

    return current_architecture(0) == "sm_90a"


def _check(result, dtype):
    got, lse, want, want_lse = result
    assert np.isfinite(got).all()
    assert np.linalg.norm(got - want) <= _ERROR[dtype] * max(np.linalg.norm(want), 1e-30)
    seen = np.isfinite(want_lse)
    np.testing.assert_array_equal(np.isneginf(lse), ~seen)
    np.testing.assert_allclose(lse[seen], want_lse[seen], rtol=1e-5, atol=2e-5)
    assert (got[~seen] == 0).all()


_BORDERS = (0, 1, 2, 15, 16, 17, 63, 64, 65, 79, 80, 81, 111, 112, 113, 127, 128, 129, 191, 192)
_BORDERS += (193, 255, 256, 257, 383, 384, 385, 400)


def _random_case(rng):
    batch = int(rng.integers(1, 6))
    lens_q = rng.choice(_BORDERS, batch)
    lens_k = np.where(rng.random(batch) < 0.7, lens_q + rng.choice(_BORDERS, batch), lens_q // 2)
    lens_q[0], lens_k[0] = max(lens_q[0], 1), max(lens_k[0], 1)
    kv_heads, group = int(rng.integers(1, 4)), int(rng.choice([1, 2, 3, 4, 7, 8]))
    causal = bool(rng.random() < 0.75)
    return AttentionCase(
        tuple(map(int, lens_q)),
        tuple(map(int, lens_k)),
        kv_heads * group,
        kv_heads,
        int(rng.choice([40, 64, 80, 96, 128, 192, 224, 256])),
        block_size=int(rng.choice([0, 0, 16, 32, 64, 128])),
        causal=causal,
        window=int(rng.choice([0, 0, 1, 50, 130])) if causal else 0,
        softcap=float(rng.choice([0.0, 0.0, 5.0])),
    )


@pytest.mark.gpu
@pytest.mark.grid("dtype", _HALVES)
@pytest.mark.grid("seed", range(32))
def test_random_problems(cp, seed, dtype):
    rng = np.random.default_rng(seed)
    case = _random_case(rng)
    num_splits = [None, None, 1, 3][seed % 4]
    _check(_run(cp, case, dtype, seed=seed, num_splits=num_splits), dtype)


@pytest.mark.gpu
@pytest.mark.grid("dtype", _HALVES)
@pytest.mark.grid("growth", [0.02, 0.5, -0.5])
@pytest.mark.grid("head_dim", [64, 256])
def test_scores_that_grow_or_fall_with_the_key(cp, growth, dtype, head_dim):
    """The maximum rises with every tile or never, since tiles run from the last key backwards."""
    n = 700
    q = np.ones((n, 2, head_dim)) / head_dim**0.5
    k = np.zeros((n, 2, head_dim)) + growth * np.arange(n)[:, None, None]
    v = np.random.default_rng(8).standard_normal((n, 2, head_dim))
    arrays = [x.astype(cases.normal((1,), dtype, 0).dtype) for x in (q, k, v)]
    case = AttentionCase((n,), (n,), 2, 2, head_dim)
    want, want_lse = _float64(*arrays, case)
    lens = cp.asarray(cu_seqlens([n]))
    got, lse = kernels.attention_prefill(
        *cases.to_module(cp, *arrays), cu_seqlens_q=lens, cu_seqlens_k=lens, return_lse=True
    )
    _check((to_numpy(got).astype(np.float64), to_numpy(lse), want, want_lse), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [128, 256])
def test_a_row_has_the_same_bits_in_any_company_and_chunk(cp, head_dim):
    case = AttentionCase((500, 70), (500, 333), 8, 2, head_dim, block_size=16)
    q = cases.normal((570, 8, head_dim), "bfloat16", 1)
    k, v, tables, lens = paged_cache(case.lens_k, 2, 16, head_dim, "bfloat16", 2)
    q, k, v, tables = cases.to_module(cp, q, k, v, tables)

    def attend(rows, sequence, context):
        return kernels.attention_prefill(
            q[rows],
            k,
            v,
            cu_seqlens_q=cp.asarray(cu_seqlens([rows.stop - rows.start])),
            block_tables=tables[sequence : sequence + 1],
            context_lens=cp.asarray([context], dtype=np.int32),
            num_splits=1,
        )

    whole = kernels.attention_prefill(
        q,
        k,
        v,
        cu_seqlens_q=cp.asarray(cu_seqlens(case.lens_q)),
        block_tables=tables,
        context_lens=cp.asarray(lens),
        num_splits=1,
    )
    for begin, end in ((0, 1), (1, 130), (130, 333), (333, 500)):
        part = attend(slice(begin, end), 0, end)
        assert bool((part.view(np.uint16) == whole[begin:end].view(np.uint16)).all())
    part = attend(slice(500, 570), 1, 333)
    assert bool((part.view(np.uint16) == whole[500:].view(np.uint16)).all())


_RULES = ({}, {"window": 75}, {"softcap": 5.0}, {"sinks": True}, {"scale": 2.0})
_ENDS = np.array([1, 2, 64, 79, 80, 81, 112, 113, 128, 129, 333, 640, 999, 1000])


@pytest.mark.gpu
@pytest.mark.grid("dtype", _HALVES)
@pytest.mark.grid("head_dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.grid("group", [1, 3, 4, 8, 16])
@pytest.mark.grid("parts", [0, 1, 2, 4])
def test_few_rows_have_the_bits_of_many(cp, monkeypatch, parts, group, head_dim, dtype):
    rule = _RULES[(group + head_dim // 32) % len(_RULES)]
    _check_few_rows(cp, monkeypatch, parts, group, head_dim, dtype, "", rule)


@pytest.mark.gpu
@pytest.mark.grid("parts", [0, 1, 2, 4])
@pytest.mark.grid("head_dim", [64, 128])
@pytest.mark.grid("rule", _RULES, ids=str)
def test_few_rows_have_the_bits_of_many_by_rule(cp, monkeypatch, rule, head_dim, parts):
    _check_few_rows(cp, monkeypatch, parts, 4, head_dim, "bfloat16", "", rule)


@pytest.mark.gpu
@pytest.mark.grid("is_alone", [False, True])
@pytest.mark.grid("codes", ["fp8", "int8"])
@pytest.mark.grid("head_dim", [64, 128])
@pytest.mark.grid("rule", _RULES, ids=str)
def test_few_rows_of_codes_have_the_bits_of_many(cp, monkeypatch, rule, head_dim, codes, is_alone):
    few = prefill_sm90.HopperTile.few_rows
    monkeypatch.setattr(
        prefill_sm90.HopperTile, "few_rows", lambda tile, **_: few(tile, is_alone=is_alone)
    )
    _check_few_rows(cp, monkeypatch, 0, 4, head_dim, "bfloat16", codes, rule)


def _force_parts(monkeypatch, parts, head_dim, launches, value_dim=None):
    """Let few rows take this many CTAs per pair, or the persistent kernel with 0."""
    tile = choose_hopper_tile("bfloat16", head_dim, value_dim=value_dim)
    while parts and not FewTokensTile(tile, parts).is_supported:
        parts //= 2
    monkeypatch.setattr(few_tokens, "choose_tile", lambda *_: None)
    if parts:
        monkeypatch.setattr(
            few_tokens,
            "choose_tile",
            lambda q, keys, out, most: (
                FewTokensTile(tile, parts)
                if most * q.shape[1] // keys["k"].shape[1] <= 16
                else None
            ),
        )
    kernel = few_tokens._KERNELS if parts else prefill_sm90._KERNELS
    for one in kernel.values():
        launch = one.launch
        monkeypatch.setattr(
            one,
            "launch",
            lambda spec, *rest, launch=launch, **options: (
                launches.append(spec),
                launch(spec, *rest, **options),
            ),
        )


def _check_few_rows(cp, monkeypatch, parts, group, head_dim, dtype, codes, rule):
    """Compare the last token or two of a sequence alone with a prompt of it; see `_ENDS`."""
    if not _is_hopper():
        pytest.skip("the kernels for few rows are Hopper's")
    launches = []
    _force_parts(monkeypatch, parts, head_dim, launches)
    heads, length = 2, int(_ENDS.max())
    q = cp.asarray(cases.normal((length, heads * group, head_dim), dtype, 1))
    k, v, tables, _ = paged_cache((length,), heads, 32, head_dim, dtype, 2)
    rule = dict(rule)
    if codes:
        (k, k_scale), (v, v_scale) = as_codes(k, 5, codes), as_codes(v, 6, codes)
        rule |= {"k_scale": cp.asarray(k_scale), "v_scale": cp.asarray(v_scale)}
    if rule.pop("sinks", False):
        rule["sinks"] = cp.asarray(cases.normal((heads * group,), "float32", 3))
    k, v, tables = cases.to_module(cp, k, v, tables)

    def attend(rows, counts, contexts):
        out, lse = kernels.attention_prefill(
            q[rows],
            k,
            v,
            cu_seqlens_q=cp.asarray(cu_seqlens(counts)),
            block_tables=cp.repeat(tables, len(counts), axis=0),
            context_lens=cp.asarray(contexts, dtype=np.int32),
            max_seqlen_q=max(counts),
            num_splits=1,
            pdl=group > 3,  # CuPy's kernels before it end before it starts
            return_lse=True,
            **rule,
        )
        return to_numpy(out).view(np.uint16), to_numpy(lse).view(np.uint32)

    want = attend(slice(None), (length,), (length,))
    for count in (1, 2):
        ends = _ENDS[count - 1 :]
        rows = (ends[:, None] - count + np.arange(count)).ravel()
        launches.clear()
        got = attend(cp.asarray(rows), (count,) * len(ends), ends)
        macros = {name for spec in launches for name in dict(spec.defines)}
        wanted = {"FIXED_BYTES" if parts else "FEW_ROWS"} if count * group <= 16 else set()
        assert macros & {"FIXED_BYTES", "FEW_ROWS"} == wanted
        for part, whole in zip(got, want, strict=True):
            np.testing.assert_array_equal(part, whole[rows])


@pytest.mark.gpu
@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("size", [16, 64, 128])
def test_long_contexts_of_few_rows(cp, monkeypatch, parts, size):
    """The rings wrap many times; one sequence has no keys."""
    if not _is_hopper():
        pytest.skip("the kernels for few rows are Hopper's")
    lens = (21000, 0, 11, 10240)
    q = cp.asarray(cases.normal((len(lens), 4, 128), "bfloat16", 1))
    k, v, tables, context = paged_cache(lens, 1, size, 128, "bfloat16", 2)
    k, v, tables, context = cases.to_module(cp, k, v, tables, context)

    starts = cp.arange(len(lens) + 1, dtype=np.int32)

    def attend(**options):
        return kernels.attention_prefill(
            q,
            k,
            v,
            cu_seqlens_q=starts,
            block_tables=tables,
            context_lens=context,
            max_seqlen_q=1,
            num_splits=1,
            **options,
        ).view(np.uint16)

    with monkeypatch.context() as patch:
        _force_parts(patch, 0, 128, [])
        want = attend()
    launches = []
    _force_parts(monkeypatch, parts, 128, launches)
    got = [attend(pdl=i > 9) for i in range(20)]  # the last ones overlap
    assert all(bool((one == want).all()) for one in got)
    assert len(launches) == 20


@pytest.mark.gpu
@pytest.mark.grid("parts", [1, 2, 4])
@pytest.mark.grid("causal", [False, True])
@pytest.mark.parametrize("dims", [(192, 128), (192, 72), (128, 40), (64, 64)], ids=str)
def test_few_rows_of_dense_keys(cp, monkeypatch, dims, causal, parts):
    """Values may be narrower than keys; one sequence has no queries."""
    if not _is_hopper():
        pytest.skip("the kernels for few rows are Hopper's")
    lens_q, lens_k = (2, 0, 1, 3), (200, 5, 81, 160)
    head_dim, value_dim = dims
    q = cases.normal((sum(lens_q), 4, head_dim), "bfloat16", 1)
    k = cases.normal((sum(lens_k), 2, head_dim), "bfloat16", 2)
    v = cases.normal((sum(lens_k), 2, value_dim), "bfloat16", 3)
    q, k, v = cases.to_module(cp, q, k, v)
    starts = {"cu_seqlens_q": cp.asarray(cu_seqlens(lens_q))}
    starts["cu_seqlens_k"] = cp.asarray(cu_seqlens(lens_k))

    def attend():
        options = {"causal": causal, "max_seqlen_q": 3, "num_splits": 1, "return_lse": True}
        out, lse = kernels.attention_prefill(q, k, v, **starts, **options)
        return to_numpy(out).view(np.uint16), to_numpy(lse).view(np.uint32)

    with monkeypatch.context() as patch:
        _force_parts(patch, 0, head_dim, [], value_dim)
        want = attend()
    launches = []
    _force_parts(monkeypatch, parts, head_dim, launches, value_dim)
    for one, other in zip(attend(), want, strict=True):
        np.testing.assert_array_equal(one, other)
    assert "FIXED_BYTES" in dict(launches[0].defines)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 9])
def test_few_rows_wait_for_the_newest_keys(cp, batch):
    """With pdl, right after the kernel that stores them."""
    lens = [160 * (b + 1) - 79 for b in range(batch)]
    k, v, tables, context = cases.to_module(cp, *paged_cache(lens, 2, 16, 128, "bfloat16", 2))
    last = np.array(lens) - 1
    slots = cp.asarray(to_numpy(tables)[np.arange(batch), last // 16] * 16 + last % 16, np.int64)
    angles = np.random.default_rng(3).uniform(-1, 1, (max(lens), 128)).astype(np.float32)
    places = (cp.asarray(last, np.int32), cp.asarray(angles), k, v, slots)
    starts = cp.arange(batch + 1, dtype=np.int32)
    own = {"block_tables": tables, "context_lens": context, "max_seqlen_q": 1, "num_splits": 1}

    def attend(seed, *, pdl):
        rows = cp.asarray(cases.normal((batch, 8, 128), "bfloat16", seed))
        q = rows[:, :4]
        for pages in (k, v):
            pages.view(np.uint16)[slots // 16, :, slots % 16] = 0x7FC0  # NaN
        kernels.qk_norm_rope_store(q, rows[:, 4:6], rows[:, 6:], *places)
        return kernels.attention_prefill(q, k, v, cu_seqlens_q=starts, **own, pdl=pdl)

    for seed in range(10, 30):
        want, got = (attend(seed, pdl=pdl).view(np.uint16) for pdl in (False, True))
        assert bool((want == got).all())
        assert np.isfinite(to_numpy(got).view(k.dtype).astype(np.float32)).all()


@pytest.mark.gpu
def test_few_rows_in_place(cp):
    """Parts read whole queries, so none may write before the others have read them."""
    q = cp.asarray(cases.normal((1, 8, 128), "bfloat16", 1))
    k, v, tables, context = cases.to_module(cp, *paged_cache((700,), 2, 16, 128, "bfloat16", 2))
    own = {"block_tables": tables, "context_lens": context, "max_seqlen_q": 1, "num_splits": 1}
    own["cu_seqlens_q"] = cp.asarray(cu_seqlens([1]))
    want = kernels.attention_prefill(q, k, v, **own)
    got = kernels.attention_prefill(q, k, v, out=q, **own)
    assert got is q and bool((got.view(np.uint16) == want.view(np.uint16)).all())
    for out, parts in ((q, 1), (want, 4)):
        chosen = few_tokens.choose_tile(q, {"k": k, "cu_seqlens_q": own["cu_seqlens_q"]}, out, 1)
        assert chosen is None or chosen.parts == parts or not _is_hopper()


def test_parts_have_whole_boxes_of_values():
    for head_dim in range(40, 257, 8):
        tile = choose_hopper_tile("bfloat16", head_dim)
        for parts in (1, 2, 4):
            chosen = FewTokensTile(tile, parts)
            if not chosen.is_supported:
                continue
            assert chosen.stages in (2, 4, 8) and chosen.shared_bytes <= 227 * 1024
            assert chosen.spec("bfloat16") in few_tokens.specs("bfloat16", head_dim=head_dim)
            assert chosen.value_columns * parts == tile.value_dim


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_row_has_the_same_bits_however_sequences_are_cut(cp, head_dim):
    """With all keys visible, a single sequence uses 64-row tiles; many sequences do not."""
    n, batch = 450, 30
    assert choose_cut(n, 192, 2, 3, 132) != choose_cut(n, 192, 2 * batch, 3, 132)
    q, k, v = (
        cp.asarray(cases.normal((batch * n, 2, head_dim), "bfloat16", seed)) for seed in range(3)
    )

    def attend(count):
        lens = cp.asarray(cu_seqlens([n] * count))
        rows = slice(0, count * n)
        return kernels.attention_prefill(
            q[rows], k[rows], v[rows], cu_seqlens_q=lens, cu_seqlens_k=lens, causal=False,
            num_splits=1,
        )  # fmt: skip

    assert bool((attend(1).view(np.uint16) == attend(batch)[:n].view(np.uint16)).all())


def test_tensor_maps_describe_no_reversed_or_repeated_axis():
    def placed(x):  # a CuPy array at address 0
        return SimpleNamespace(
            data=SimpleNamespace(ptr=0), shape=x.shape, strides=x.strides, itemsize=x.itemsize
        )

    x = np.zeros((6, 4, 64), np.float16)
    for rows in (x, x[::2], x[:, ::2], x.transpose(1, 0, 2), x[:1][::-1], x[:0]):
        assert are_tensor_map_rows(placed(rows))
    for rows in (x[::-1], x[:, ::-1], np.broadcast_to(x[:1], x.shape), x[:, :, :60]):
        assert not are_tensor_map_rows(placed(x), placed(rows))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_reversed_and_repeated_axes(cp, head_dim):
    """Views that no tensor map describes give what their copies give."""
    q = cp.asarray(cases.normal((200, 4, head_dim), "bfloat16", 0))
    k, v = (cp.asarray(cases.normal((200, 1, head_dim), "bfloat16", seed)) for seed in (1, 2))
    lens = cp.asarray(cu_seqlens([70, 130]))
    where = {"cu_seqlens_q": lens, "cu_seqlens_k": lens}
    dout = cp.broadcast_to(q[:1], q.shape)
    views = dout, q[:, ::-1], *(cp.broadcast_to(x, q.shape) for x in (k, v))
    whole = [cp.ascontiguousarray(x) for x in views]
    out, lse = kernels.attention_prefill(*whole[1:], **where, return_lse=True)
    wanted = out, *kernels.attention_backward(*whole, out, lse, **where)
    got = kernels.attention_prefill(*views[1:], **where)
    results = got, *kernels.attention_backward(*views, out, lse, **where)
    for x, want in zip(results, wanted, strict=True):
        x, want = (to_numpy(each).astype(np.float64) for each in (x, want))
        assert np.linalg.norm(x - want) <= 1e-2 * np.linalg.norm(want)


@pytest.mark.gpu
def test_portable_tier_can_be_forced(cp, monkeypatch):
    if not _is_hopper():
        pytest.skip("needs compute capability 9.0")
    q = cp.ones((4, 2, 64), np.float16)
    assert prefill_sm90.is_supported(q, q, q, q) and are_aligned(q)
    monkeypatch.setenv("ENGINE_KERNEL_TIER", "portable")
    assert not prefill_sm90.is_supported(q, q, q, q)
    lens = cp.asarray(cu_seqlens([4]))
    assert bool(
        (kernels.attention_prefill(q, q, q, cu_seqlens_q=lens, cu_seqlens_k=lens) == 1).all()
    )


@pytest.mark.gpu
@pytest.mark.grid("causal", [False, True])
@pytest.mark.grid("n", [1000, 8192])
@pytest.mark.grid("head_dim", [64, 96, 128, 192, 256])
def test_error_is_no_larger_than_cudnns(cp, head_dim, n, causal):
    torch = pytest.importorskip("torch")
    from torch.nn.attention import SDPBackend, sdpa_kernel

    heads = 2
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, n, head_dim, device="cuda").bfloat16() for _ in range(3))
    judge = torch.nn.functional.scaled_dot_product_attention(
        *(x.double() for x in (q, k, v)), is_causal=causal
    )
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    arrays = [x[0].transpose(0, 1).float().cpu().numpy() for x in (q, k, v)]
    bfloat16 = cases.normal((1,), "bfloat16", 0).dtype
    lens = cp.asarray(cu_seqlens([n]))
    ours = kernels.attention_prefill(
        *(cp.asarray(x.astype(bfloat16)) for x in arrays),
        cu_seqlens_q=lens,
        cu_seqlens_k=lens,
        causal=causal,
    )
    want = judge[0].transpose(0, 1).cpu().numpy()
    error = np.linalg.norm(to_numpy(ours).astype(np.float64) - want)
    ratio = error / float((theirs.double() - judge).norm())
    print(f"error, in cuDNN's: {ratio:.4f}")
    assert ratio <= 1.003  # both round P (whose maximum is exactly 1) and the result
