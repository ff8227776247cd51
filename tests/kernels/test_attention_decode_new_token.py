"""attention_decode with a fused new token: equals qk_norm_rope_store, then attention_decode."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import ContractError, DTypeError, ShapeError
from engine.kernels.attention_decode import sm90 as decode_sm90
from engine.kernels.attention_decode.sm90 import HopperTile
from engine.testing import cases
from engine.testing.cases_attention import AttentionCase, paged_cache
from engine.testing.cases_elementwise import cos_sin_table
from engine.testing.tolerances import assert_close

_POSITIONS = 97
_NORMS = ["none", "both", "only_q", "only_k"]
_MANY = tuple(np.random.default_rng(0).integers(0, 700, 40).tolist())
_SHORT = tuple(np.random.default_rng(1).integers(0, 200, 140).tolist())

# Three splits, mostly of one tile, so Q is copied as often as K and V.
_SHORT_SPLITS = AttentionCase((1,) * 140, _SHORT, 112, 8, 128, block_size=16, window=70)

# Few and many sequences (clusters, persistent CTAs with and without new-token warps), lengths near
# multiples of 64- and 128-key tiles and of pages, groups up to and beyond a kernel's thread count.
_CASES = (
    AttentionCase((1,), (1,), 8, 2, 128, block_size=16),
    AttentionCase((1,), (1000,), 32, 8, 128, block_size=16),
    AttentionCase((1,), (2049,), 16, 8, 128, block_size=16),
    AttentionCase((1,) * 6, (0, 1, 15, 16, 17, 64), 14, 2, 64, block_size=16),
    AttentionCase((1,) * 5, (63, 65, 127, 128, 129), 8, 2, 128, block_size=64),
    AttentionCase((1,) * 4, (0, 511, 513, 1024), 4, 4, 64, block_size=32),
    AttentionCase((1,) * 6, (0, 127, 128, 129, 5000, 0), 8, 2, 64, block_size=32),
    AttentionCase((1,) * 40, _MANY, 8, 2, 128, block_size=16),
    AttentionCase((1,) * 80, (*_MANY, *_MANY), 4, 1, 64, block_size=128),
    AttentionCase((1,) * 20, (1, 128, 129, 255, 256) * 4, 32, 2, 128, block_size=16),
    AttentionCase((1,) * 50, (*_MANY[:11], 0, *_MANY[:7], *(0,) * 31), 8, 8, 128, block_size=16),
    AttentionCase((1,) * 20, (0,) * 20, 8, 8, 64, block_size=16),
    AttentionCase((1,) * 40, _MANY, 16, 4, 128, block_size=16),
    AttentionCase((1,) * 80, (*_MANY, *_MANY), 14, 2, 64, block_size=16),
    AttentionCase((1,) * 140, _SHORT, 14, 1, 128, block_size=32),
    AttentionCase((1,) * 40, _MANY, 8, 4, 64, block_size=16, window=100),
    AttentionCase((1,) * 280, _SHORT * 2, 16, 8, 64, block_size=16),
    AttentionCase((1,) * 40, (577,) * 40, 32, 4, 128, block_size=16),
    AttentionCase((1,) * 70, (*(577,) * 64, *(0,) * 6), 8, 4, 128, block_size=16),
    AttentionCase((1,) * 70, (577,) * 70, 8, 4, 128, block_size=16),
    _SHORT_SPLITS,
    AttentionCase((1,) * 2, (300, 40), 14, 1, 128, block_size=16),
    AttentionCase((1,) * 2, (300, 40), 16, 1, 128, block_size=16),
    AttentionCase((1,) * 2, (300, 40), 17, 1, 64, block_size=16),
    AttentionCase((1,) * 3, (400, 20, 77), 4, 2, 64, block_size=16, window=100),
    AttentionCase((1,) * 30, (400, 20, 77) * 10, 4, 2, 128, block_size=16, window=1),
    AttentionCase((1,) * 20, (400, 20) * 10, 4, 1, 128, block_size=16, softcap=5.0, scale=0.2),
    AttentionCase((1,) * 12, (*range(126, 131), 0, 1, 4000, 513, 77, 0, 3), 14, 2, 128, 16),
    AttentionCase((1,) * 12, (*range(126, 131), 0, 1, 4000, 513, 77, 0, 3), 14, 2, 64, 16),
    AttentionCase((1,) * 15, (*range(60, 70), 0, 1, 1000, 513, 2), 28, 4, 128, block_size=16),
    AttentionCase((1,) * 15, (*range(60, 70), 0, 1, 1000, 513, 2), 28, 4, 64, block_size=32),
    AttentionCase((1,) * 33, (*range(60, 70), 0, 1, 1000, *_MANY[:20]), 28, 4, 128, block_size=16),
    AttentionCase((1,) * 33, (*range(60, 70), 0, 1, 1000, *_MANY[:20]), 14, 2, 64, block_size=32),
    AttentionCase((1,) * 40, (1500, *_MANY[:39]), 12, 3, 128, block_size=16),
    AttentionCase((1,), (1000,), 32, 8, 128, block_size=16, chunk=512),
    AttentionCase((1,) * 40, _MANY, 8, 2, 128, block_size=16, chunk=64),
    AttentionCase((1,) * 280, _SHORT * 2, 16, 8, 64, block_size=16, chunk=64),
    AttentionCase((1,) * 2, (70, 16), 4, 2, 96, block_size=16),
    AttentionCase((1,) * 2, (70, 16), 6, 2, 20, block_size=16),
)


def _inputs(case, dtype, norms, *, seed=0, rotary_dim=None, num_shared=0, num_lost=0):
    """Fused rows (B, H + 2K, D), key and value pages, and keyword arguments, as NumPy arrays.

    Each newest key's slot is poisoned. `num_lost` tokens are not stored: their slots hold other
    keys.
    """
    rng = np.random.default_rng(seed)
    batch, dim, kv_heads = len(case.lens_k), case.head_dim, case.num_kv_heads
    sizes = kv_heads, case.block_size, dim
    k_pages, v_pages, tables, lens = paged_cache(
        case.lens_k, *sizes, dtype, seed=seed + 1, num_shared=num_shared
    )
    qkv = cases.normal((batch, case.num_heads + 2 * kv_heads, dim), dtype, seed=seed + 4)
    last = np.maximum(lens - 1, 0)
    size = case.block_size
    pages = tables[np.arange(batch), last // size].astype(np.int64)
    slots = np.where(lens > 0, pages * size + last % size, -1)
    slots[rng.permutation(batch)[:num_lost]] = -1
    for slot in slots[slots >= 0]:
        for pool in (k_pages, v_pages):
            pool[slot // size, :, slot % size] = np.nan
    keywords = {
        "block_tables": tables,
        "context_lens": lens,
        "positions": rng.integers(0, _POSITIONS, batch).astype(np.int32),
        "cos_sin": cos_sin_table(_POSITIONS, dim if rotary_dim is None else rotary_dim),
        "slot_mapping": slots,
    }
    for i, name in enumerate("qk"):
        if norms in ("both", f"only_{name}"):
            weight = cases.normal((dim,), dtype, seed=seed + 5 + i, scale=0.1, mean=1.0)
            keywords[f"{name}_weight"] = weight
    return qkv, k_pages, v_pages, keywords


def _split(qkv, case):
    """Return views of q, k and v, each (B, 1, heads, D)."""
    h, k = case.num_heads, case.num_kv_heads
    rows = qkv[:, None]
    return rows[:, :, :h], rows[:, :, h : h + k], rows[:, :, h + k :]


def _run(op, xp, case, inputs, **more):
    """Call the op on copies; return its result and the updated pages."""
    qkv, k_pages, v_pages, keywords = inputs
    qkv, k_pages, v_pages = (xp.array(a) for a in (qkv, k_pages, v_pages))
    keywords = {name: xp.asarray(a) for name, a in keywords.items()}
    q, k, v = _split(qkv, case)
    result = op(q, k_pages, v_pages, k=k, v=v, **keywords, **case.rule, **more)
    return result, (k_pages, v_pages)


def _unfused(xp, case, inputs, *, module=kernels, eps=1e-6, weight_offset=0.0, **more):
    qkv, k_pages, v_pages, keywords = inputs
    qkv, k_pages, v_pages = (xp.array(a) for a in (qkv, k_pages, v_pages))
    keywords = {name: xp.asarray(a) for name, a in keywords.items()}
    where = {name: keywords.pop(name) for name in ("block_tables", "context_lens")}
    places = [keywords.pop(name) for name in ("positions", "cos_sin", "slot_mapping")]
    q, k, v = (rows[:, 0] for rows in _split(qkv, case))
    keywords |= {"eps": eps, "weight_offset": weight_offset}
    module.qk_norm_rope_store(q, k, v, *places[:2], k_pages, v_pages, places[2], **keywords)
    result = module.attention_decode(q[:, None], k_pages, v_pages, **where, **case.rule, **more)
    return result, (k_pages, v_pages)


def _bits(array):
    host = np.ascontiguousarray(to_numpy(array))
    return host.view({2: np.uint16, 4: np.uint32}[host.itemsize])


@pytest.mark.parametrize("norms", _NORMS)
@pytest.mark.parametrize("case", _CASES, ids=range(len(_CASES)))
def test_mirror_is_one_mirror_after_the_other(case, norms):
    inputs = _inputs(case, "float32", norms, num_lost=len(case.lens_k) // 3)
    options = {"eps": 1e-5, "weight_offset": 0.5, "return_lse": True}
    got, pages = _run(reference.attention_decode, np, case, inputs, **options)
    want, want_pages = _unfused(np, case, inputs, module=reference, **options)
    for a, b in zip((*got, *pages), (*want, *want_pages), strict=True):
        np.testing.assert_array_equal(a, b)


def test_mirror_leaves_its_rows():
    case = _CASES[4]
    qkv, k_pages, v_pages, keywords = _inputs(case, "float32", "both")
    before = qkv.copy()
    q, k, v = _split(qkv, case)
    reference.attention_decode(q, k_pages, v_pages, k=k, v=v, **keywords)
    np.testing.assert_array_equal(qkv, before)


@pytest.mark.grid("norms", _NORMS[:2])
@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("case", _CASES, ids=range(len(_CASES)))
def test_matches_mirror(xp, case, dtype, norms, tier):
    if xp is np and tier == "portable":
        pytest.skip("there is one mirror for both tiers")
    lost = len(case.lens_k) // 3 if norms == "both" else 0
    inputs = _inputs(case, dtype, norms, num_lost=lost, seed=len(norms))
    options = {"eps": 1e-5, "weight_offset": 0.5, "return_lse": True}
    want, want_pages = _run(reference.attention_decode, np, case, inputs, **options)
    for num_splits in (None, 3):
        out, buffer = cases.guarded(xp, want[0].shape, want[0].dtype)
        more = {"num_splits": num_splits, "max_context_len": max(case.lens_k), "out": out}
        got, pages = _run(kernels.attention_decode, xp, case, inputs, **options, **more)
        assert got[0] is out
        assert_close(got[0], want[0], reduction=case.reduction)
        # q and k are rounded once more in between, so scores are only as exact as their dtype.
        assert_close(got[1], want[1], reduction=case.reduction, name="lse", dtype=dtype)
        assert bool(xp.isnan(buffer[:64]).all()) and bool(xp.isnan(buffer[-64:]).all())
        for name, have, wanted in zip("kv", pages, want_pages, strict=True):
            assert_close(have, wanted, reduction=case.head_dim, name=name)


@pytest.mark.gpu
@pytest.mark.grid("norms", _NORMS)
@pytest.mark.grid("dtype", ["float16", "bfloat16"])
@pytest.mark.grid("case", _CASES, ids=range(len(_CASES)))
def test_bits_are_those_of_the_two_ops(cp, case, dtype, norms):
    inputs = _inputs(case, dtype, norms, num_lost=len(case.lens_k) // 4, seed=7)
    for num_splits in (None, 3):
        for bound in (None, max(case.lens_k)):
            more = {"num_splits": num_splits, "max_context_len": bound, "return_lse": True}
            got, pages = _run(kernels.attention_decode, cp, case, inputs, **more)
            want, want_pages = _unfused(cp, case, inputs, **more)
            for a, b in zip((*got, *pages), (*want, *want_pages), strict=True):
                np.testing.assert_array_equal(_bits(a), _bits(b))


def _in_one_order(xp, case, inputs, **more):
    """The store, then attention_prefill with one split."""
    qkv, k_pages, v_pages, keywords = inputs
    qkv, k_pages, v_pages = (xp.array(a) for a in (qkv, k_pages, v_pages))
    keywords = {name: xp.asarray(a) for name, a in keywords.items()}
    where = {name: keywords.pop(name) for name in ("block_tables", "context_lens")}
    places = [keywords.pop(name) for name in ("positions", "cos_sin", "slot_mapping")]
    q, k, v = (rows[:, 0] for rows in _split(qkv, case))
    kernels.qk_norm_rope_store(q, k, v, *places[:2], k_pages, v_pages, places[2], **keywords)
    where["cu_seqlens_q"] = xp.arange(len(q) + 1, dtype=np.int32)
    more |= {"max_seqlen_q": 1, "num_splits": 1}
    out, *lse = kernels.attention_prefill(q, k_pages, v_pages, **where, **case.rule, **more)
    return (out[:, None], *(x[:, None] for x in lse)), (k_pages, v_pages)


@pytest.mark.grid("norms", _NORMS)
@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("case", [c for c in _CASES if not c.chunk])
def test_deterministic_has_the_bits_of_a_prompt(xp, case, dtype, norms):
    """The CPU's mirrors have different orders of sums: there the results are close."""
    inputs = _inputs(case, dtype, norms, num_lost=len(case.lens_k) // 4, seed=7)
    results, pages = _in_one_order(xp, case, inputs, return_lse=True)
    for pdl in (False, True):
        options = {"deterministic": True, "pdl": pdl, "return_lse": True}
        got, got_pages = _run(kernels.attention_decode, xp, case, inputs, **options)
        for have, wanted in zip(got_pages, pages, strict=True):
            np.testing.assert_array_equal(_bits(have), _bits(wanted))
        for have, wanted in zip(got, results, strict=True):
            if xp is np:
                assert_close(have, wanted, reduction=case.reduction, dtype=dtype)
            else:
                np.testing.assert_array_equal(_bits(have), _bits(wanted))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deterministic_writes_to_a_view(cp, dtype):
    """Between the tokens of two sequences lies more than between those of one."""
    q = cp.asarray(cases.normal((2, 3, 8, 64), dtype, seed=1))
    pages = [cp.asarray(cases.normal((4, 2, 16, 64), dtype, seed=seed)) for seed in (2, 3)]
    lens = cp.asarray([20, 7], np.int32)
    where = {"block_tables": cp.asarray([[1, 2], [0, 3]], np.int32), "context_lens": lens}
    want = kernels.attention_decode(q, *pages, **where, deterministic=True)
    out = cp.zeros((2, 5, 8, 64), q.dtype)[:, 1:4]
    got = kernels.attention_decode(q, *pages, **where, deterministic=True, out=out)
    assert got is out
    np.testing.assert_array_equal(_bits(out), _bits(want))


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"num_splits": 2}, "num_splits"),
        ({"quantize_out": True}, "quantize_out"),
        ({"chunk": 16}, "chunk"),
        ({"tree_mask": np.ones((1, 1), np.uint64)}, "tree_mask"),
    ],
)
def test_what_deterministic_excludes(wrong, name):
    case = _CASES[0]
    qkv, k_pages, v_pages, keywords = _inputs(case, "float32", "none")
    where = {name: keywords[name] for name in ("block_tables", "context_lens")}
    with pytest.raises(ContractError, match=f"attention_decode: {name}: .* deterministic"):
        kernels.attention_decode(
            _split(qkv, case)[0], k_pages, v_pages, **where, deterministic=True, **wrong
        )


@pytest.mark.gpu
def test_deterministic_launches_one_kernel(cp, launched):
    one = "attention_prefill_few_tokens_sm90"
    for batch, is_fused in ((1, True), (16, True), (17, False)):
        case = AttentionCase((1,) * batch, (100,) * batch, 16, 8, 128, block_size=16)
        launched.clear()
        inputs = _inputs(case, "bfloat16", "both")
        _run(kernels.attention_decode, cp, case, inputs, deterministic=True)
        assert (launched == [one]) == is_fused, launched


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("case", _CASES, ids=range(len(_CASES)))
def test_codes_are_those_of_the_result(xp, case, dtype):
    """Of the kernel for many sequences, which quantizes the result itself, and of all others."""
    inputs = _inputs(case, dtype, "both", seed=3)
    batch, width = len(case.lens_k), case.num_heads * case.head_dim
    for op in (_run, _unfused_op):
        for num_splits in (None, 3):
            more = {"num_splits": num_splits, "max_context_len": max(case.lens_k)}
            more["return_lse"] = num_splits is None
            plain, pages = op(kernels.attention_decode, xp, case, inputs, **more)
            for _ in range(2):  # the second call may overlap the first
                coded, own_pages = op(
                    kernels.attention_decode, xp, case, inputs, quantize_out=True, **more
                )
            out, *lse = plain if more["return_lse"] else (plain,)
            assert coded[0].shape == out.shape and coded[0].dtype == np.uint8
            assert coded[1].shape == (batch, 1, -(-width // 128))
            want = reference.quantize_rows(to_numpy(out).reshape(batch, width), group=128)
            np.testing.assert_array_equal(to_numpy(coded[0]).reshape(batch, width), want[0])
            np.testing.assert_array_equal(to_numpy(coded[1]).reshape(batch, -1), want[1])
            for a, b in zip((*coded[2:], *own_pages), (*lse, *pages), strict=True):
                np.testing.assert_array_equal(_bits(a), _bits(b))


def _unfused_op(_, *args, **more):
    return _unfused(*args, **more)


@pytest.mark.gpu
def test_which_calls_quantize_in_the_kernel(cp, launched):
    for heads, batch, is_fused in (((32, 4), 40, True), ((32, 4), 16, False), ((14, 2), 80, False)):
        dim = 64 if heads[0] == 14 else 128
        case = AttentionCase((1,) * batch, (100,) * batch, *heads, dim, block_size=16)
        launched.clear()
        inputs = _inputs(case, "bfloat16", "both")
        _run(kernels.attention_decode, cp, case, inputs, quantize_out=True)
        assert launched[0] == "attention_decode_sm90"
        assert len(launched) == 2 - is_fused, (heads, batch, launched)


@pytest.mark.gpu
@pytest.mark.parametrize("is_fused", [False, True])
def test_the_same_bits_in_thousands_of_launches(cp, is_fused):
    """TMA must not overwrite data that is still being read.

    The race occurred in at most three of a thousand launches, and only with concurrent copies; with
    half as many launches, two of six runs missed it (H200).
    """
    case = _SHORT_SPLITS
    *arrays, keywords = _inputs(case, "bfloat16", "only_k", seed=7)
    qkv, *pages = (cp.asarray(np.nan_to_num(a)) for a in arrays)
    q, k, v = _split(qkv, case)
    given = {name: cp.asarray(a) for name, a in keywords.items()}
    if is_fused:
        given |= {"k": k, "v": v}
    else:
        given = {name: given[name] for name in ("block_tables", "context_lens")}
    out = cp.empty((16, *q.shape), q.dtype)
    source, target = (cp.zeros(1 << 30, np.uint8) for _ in range(2))
    stream, beside = (cp.cuda.Stream(non_blocking=True) for _ in range(2))
    cp.cuda.runtime.deviceSynchronize()
    first, wrong = None, 0
    for _ in range(500):
        with beside:
            cp.copyto(target, source)
        with stream:
            for each in out:
                kernels.attention_decode(q, *pages, **given, **case.rule, num_splits=3, out=each)
            bits = out.view(np.uint16)
            first = bits[0].copy() if first is None else first
            wrong += int((bits != first).any())
    assert wrong == 0


@pytest.mark.gpu
def test_random_problems(cp):
    """Random shapes, lengths and options."""
    rng = np.random.default_rng(11)
    for seed in range(25):
        batch = int(rng.choice([1, 2, 5, 9, 33]))
        kv_heads, group = int(rng.choice([1, 2, 3, 8])), int(rng.choice([1, 2, 3, 4, 7, 14]))
        case = AttentionCase(
            (1,) * batch,
            tuple(rng.integers(0, rng.choice([20, 200, 3000]), batch).tolist()),
            kv_heads * group,
            kv_heads,
            int(rng.choice([64, 128])),
            block_size=int(rng.choice([16, 32, 64, 128])),
            window=int(rng.choice([0, 0, 50])),
        )
        dtype, norms = str(rng.choice(["float16", "bfloat16"])), str(rng.choice(_NORMS))
        inputs = _inputs(case, dtype, norms, seed=seed, num_lost=int(rng.integers(0, batch + 1)))
        got, pages = _run(kernels.attention_decode, cp, case, inputs)
        want, want_pages = _run(reference.attention_decode, np, case, inputs)
        assert_close(got, want, reduction=case.reduction)
        for have, wanted in zip(pages, want_pages, strict=True):
            assert_close(have, wanted, reduction=case.head_dim)
        same, _ = _unfused(cp, case, inputs)
        np.testing.assert_array_equal(_bits(got), _bits(same))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pages_that_sequences_share(xp, dtype):
    """Shared prefix pages; each newest key is in its sequence's own page."""
    case = AttentionCase((1,) * 4, (500, 49, 65, 300), 8, 2, 64, block_size=16)
    inputs = _inputs(case, dtype, "both", num_shared=3)
    got, _ = _run(kernels.attention_decode, xp, case, inputs)
    want, _ = _run(reference.attention_decode, np, case, inputs)
    assert_close(got, want, reduction=case.reduction)


@pytest.mark.parametrize("copies", [1, 10, 50])  # clusters, one CTA per SM, two
def test_the_output_may_take_the_place_of_the_queries(xp, copies):
    case = AttentionCase((1,) * 4 * copies, (0, 300, 129, 65) * copies, 8, 2, 64, block_size=16)
    qkv, *pages, keywords = inputs = _inputs(case, "bfloat16", "both")
    want, want_pages = _run(kernels.attention_decode, xp, case, inputs)
    q, k, v = _split(xp.array(qkv), case)
    pages = [xp.array(a) for a in pages]
    there = {name: xp.asarray(a) for name, a in keywords.items()}
    got = kernels.attention_decode(q, *pages, k=k, v=v, **there, **case.rule, out=q)
    assert got is q
    for a, b in zip((got, *pages), (want, *want_pages), strict=True):
        np.testing.assert_array_equal(_bits(a), _bits(b))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rotary_dim", [0, 32, 48])
def test_partial_rotation_is_not_fused(xp, rotary_dim, dtype):
    inputs = _inputs(_CASES[4], dtype, "both", rotary_dim=rotary_dim)
    got, pages = _run(kernels.attention_decode, xp, _CASES[4], inputs)
    want, want_pages = _run(reference.attention_decode, np, _CASES[4], inputs)
    assert_close(got, want, reduction=_CASES[4].reduction)
    assert_close(pages[0], want_pages[0], reduction=_CASES[4].head_dim)


@pytest.mark.parametrize("copies", [1, 20, 50])
def test_without_keys_it_is_stored_where_the_slot_says(xp, copies):
    case = AttentionCase((1,) * 3 * copies, (0, 30, 0) * copies, 8, 2, 64, block_size=16)
    inputs = _inputs(case, "bfloat16", "both")
    _, k_pages, v_pages, keywords = inputs
    free = np.setdiff1d(np.arange(len(k_pages)), keywords["block_tables"])
    assert len(free)
    for pool in (k_pages, v_pages):
        pool[free] = 0
    keywords["slot_mapping"][0] = free[-1] * 16 + 5
    got, pages = _run(kernels.attention_decode, xp, case, inputs)
    want, want_pages = _run(reference.attention_decode, np, case, inputs)
    assert_close(got, want, reduction=case.reduction)
    for have, wanted in zip(pages, want_pages, strict=True):
        assert bool((wanted[free[-1], :, 5] != 0).any())
        assert_close(have, wanted, reduction=case.head_dim)


@pytest.mark.gpu
@pytest.mark.parametrize("copies", [1, 20, 50])
def test_bad_positions_and_slots_on_the_gpu(cp, copies):
    """A position outside the table gives NaN; a slot outside the pages stores nothing."""
    case = AttentionCase((1,) * 3 * copies, (40, 128, 7) * copies, 8, 2, 64, block_size=16)
    inputs = _inputs(case, "bfloat16", "none")
    _, k_pages, v_pages, keywords = inputs
    for b, slot in enumerate(keywords["slot_mapping"]):  # old keys in the newest keys' slots
        if b % 3 == 2:
            k_pages[slot // 16, :, slot % 16] = v_pages[slot // 16, :, slot % 16] = 1
    keywords["positions"][::3] = 10**6
    keywords["slot_mapping"][2::3] = 2**40
    out, pages = _run(kernels.attention_decode, cp, case, inputs)
    want, want_pages = _unfused(cp, case, inputs)
    for a, b in zip((out, *pages), (want, *want_pages), strict=True):
        np.testing.assert_array_equal(np.isnan(to_numpy(a)), np.isnan(to_numpy(b)))
    out = to_numpy(out).astype(np.float32)
    assert np.isnan(out[::3]).all()
    assert np.isfinite(out[1::3]).all() and np.isfinite(out[2::3]).all()


@pytest.mark.gpu
@pytest.mark.parametrize("copies", [1, 20, 100])
def test_a_captured_graph_stores_and_follows(cp, copies):
    """Launched after the GEMM that produces the rows, each kernel before its predecessor ends."""
    case = AttentionCase((1,) * 2 * copies, (600, 300) * copies, 8, 2, 64, block_size=16)
    _, k_pages, v_pages, keywords = _inputs(case, "bfloat16", "both")
    batch, width = 2 * copies, 12 * 64
    weight = cases.normal((width, 256), "bfloat16", seed=1, scale=0.1)
    x, gweight = cp.zeros((batch, 256), weight.dtype), cp.asarray(weight)
    there = {name: cp.asarray(a) for name, a in keywords.items()}
    pages = [cp.asarray(np.nan_to_num(a)) for a in (k_pages, v_pages)]
    want_pages = [a.copy() for a in pages]
    rows, out = cp.zeros((batch, 12, 64), x.dtype), cp.zeros((batch, 1, 8, 64), x.dtype)
    current, places = there["context_lens"], there["slot_mapping"]
    stream = cp.cuda.Stream(non_blocking=True)

    def step():
        kernels.gemm(x, gweight, out=rows.reshape(batch, width), pdl=True)
        q, k, v = _split(rows, case)
        kernels.attention_decode(q, *pages, k=k, v=v, **there, pdl=True, out=out)

    cp.cuda.runtime.deviceSynchronize()
    with stream:
        step()  # warm-up: compile and fill the memory pool
        stream.synchronize()
        stream.begin_capture()
        step()
        graph = stream.end_capture()
        for pool, other in zip(pages, want_pages, strict=True):
            pool[:] = other
        for turn in range(4):
            lengths = np.maximum(keywords["context_lens"] // 2, 1) + turn
            blocks = keywords["block_tables"][np.arange(batch), (lengths - 1) // 16]
            current.set(lengths.astype(np.int32))
            places.set(blocks.astype(np.int64) * 16 + (lengths - 1) % 16)
            x.set(cases.normal((batch, 256), "bfloat16", seed=turn))
            graph.launch(stream)
            stream.synchronize()
            host = {n: to_numpy(a) for n, a in there.items()}
            inputs = (to_numpy(rows), *(to_numpy(a) for a in want_pages), host)
            want, wanted = _unfused(cp, case, inputs)
            want_pages = list(wanted)
            for a, b in zip((out, *pages), (want, *want_pages), strict=True):
                np.testing.assert_array_equal(_bits(a), _bits(b))


def test_tiles_that_compute_a_new_token():
    tile = HopperTile(128, 16, 3, 1, 8)
    assert [tile.can_compute_new_token(group) for group in (1, 16, 30, 31)] == [
        True,
        True,
        True,
        False,
    ]
    assert not HopperTile(128, 16, 3, 2, 8).can_compute_new_token(17)
    for dim in (64, 128):
        for tile in decode_sm90._variants(decode_sm90.choose_hopper_tile("float16", dim, 1)):
            fused = dataclasses.replace(tile, new_token=True)
            more = 4 * dim + 16  # bytes: key, value, the key's position
            has_warps = tile.ctas_per_sm == 2 and tile.cluster == 1
            if has_warps:  # two buffers, also for queries, plus the warps' schedules
                more += more + 16 * (2 * dim + 16) + 16 + 3 * 64
            assert fused.shared_bytes == tile.shared_bytes + (not tile.new_token) * more


def test_every_tile_that_is_chosen_can_compute_a_new_token(monkeypatch):
    monkeypatch.setattr(decode_sm90, "sm_count", lambda: 132)
    for dim, group, batch in itertools.product((64, 128), range(1, 17), (1, 3, 7, 40, 300)):
        base = decode_sm90.choose_hopper_tile("float16", dim, group)
        assert base.can_compute_new_token(group)
        for kv_heads, bound, may_use_clusters in itertools.product(
            (1, 8), (64, 4096, 9999), (True, False)
        ):
            shape = batch, 1, group * kv_heads, dim
            tile = decode_sm90._choose(
                "float16",
                shape,
                kv_heads,
                bound,
                kv_dtype="",
                may_use_clusters=may_use_clusters,
            )
            assert tile.can_compute_new_token(group)
            assert tile.spec("float16") in decode_sm90.specs("float16", head_dim=dim)


def test_contract(xp):
    case = AttentionCase((1,) * 2, (16, 5), 4, 2, 8, block_size=16)
    qkv, k_pages, v_pages, keywords = _inputs(case, "float32", "none")
    qkv, *pages = cases.to_module(xp, qkv, k_pages, v_pages)
    keywords = {name: xp.asarray(a) for name, a in keywords.items()}
    q, k, v = _split(qkv, case)

    def op(**changes):
        given = {"k": k, "v": v, **keywords, **changes}
        return kernels.attention_decode(given.pop("q", q), *pages, **given)

    together = "an array: k, v, positions, cos_sin, slot_mapping belong together; got None"
    for name in ("k", "v", "positions", "cos_sin", "slot_mapping"):
        with pytest.raises(ContractError, match=f"attention_decode: {name}: must be {together}"):
            op(**{name: None})
    nothing = dict.fromkeys(("k", "v", "positions", "cos_sin", "slot_mapping"))
    with pytest.raises(ContractError, match="q_weight: must be None without k; got 'an array'"):
        op(**nothing, q_weight=xp.ones(8, np.float32))
    with pytest.raises(ShapeError, match=r"v: must have shape \(B, 1, K, D\); K = 2"):
        op(v=v[:, :, :1])
    with pytest.raises(ContractError, match="Q: must be 1 with k; got 2"):
        op(q=xp.zeros((2, 2, 4, 8), np.float32))
    with pytest.raises(DTypeError, match="slot_mapping: must be int64; got int32"):
        op(slot_mapping=keywords["slot_mapping"].astype(np.int32))
    with pytest.raises(DTypeError, match="k_weight: must be float32; got float16"):
        op(k_weight=xp.ones(8, np.float16))
    with pytest.raises(ContractError, match=r"cos_sin: must be \(P, R\), R even and at most D = 8"):
        op(cos_sin=keywords["cos_sin"][:, :7])
    with pytest.raises(ContractError, match="tree_mask: must be None with k; got 'a mask'"):
        op(tree_mask=xp.ones((2, 1), np.uint64))
    with pytest.raises(ContractError, match=r"eps: must be a number from 0\.0"):
        op(eps=-1.0)


def test_a_wrong_out_is_found_before_pages_are_written(xp):
    case = AttentionCase((1,) * 2, (16, 5), 4, 2, 8, block_size=16)
    qkv, k_pages, v_pages, keywords = _inputs(case, "float32", "none")
    qkv, *pages = cases.to_module(xp, qkv, k_pages, v_pages)
    before = [to_numpy(a).copy() for a in pages]
    keywords = {name: xp.asarray(a) for name, a in keywords.items()}
    q, k, v = _split(qkv, case)
    wide = xp.zeros((2, 1, 4, 16), np.float32)
    for out, message in ((wide, "must have shape"), (wide[..., ::2], "last axis must be contig")):
        with pytest.raises(ShapeError, match=message):
            kernels.attention_decode(q, *pages, k=k, v=v, **keywords, out=out)
    for have, kept in zip(pages, before, strict=True):
        np.testing.assert_array_equal(to_numpy(have), kept)


def test_contract_checks_values_on_the_host():
    case = AttentionCase((1,) * 2, (16, 5), 4, 2, 8, block_size=16)
    qkv, *pages, keywords = _inputs(case, "float32", "none")
    q, k, v = _split(qkv, case)
    for name, by, limit in (("positions", np.int32(97), 96), ("slot_mapping", 64, 63)):
        changed = {**keywords, name: keywords[name] + by}
        with pytest.raises(ContractError, match=rf"{name}: must be from (0|-1) to {limit}; got"):
            kernels.attention_decode(q, *pages, k=k, v=v, **changed)


@pytest.mark.parametrize("name", ["k_pages", "v_pages"])
def test_read_only_pages_are_refused_before_anything_is_written(name):
    case = AttentionCase((1,) * 2, (16, 5), 4, 2, 8, block_size=16)
    qkv, k_pages, v_pages, keywords = _inputs(case, "float32", "none")
    q, k, v = _split(qkv, case)
    pages = {"k_pages": k_pages, "v_pages": v_pages}
    before = [array.copy() for array in pages.values()]
    pages[name].flags.writeable = False
    kernels.attention_decode(
        q, **pages, **{key: keywords[key] for key in ("block_tables", "context_lens")}
    )
    with pytest.raises(ContractError, match=f"{name}: must be writeable; got a read-only array"):
        kernels.attention_decode(q, **pages, k=k, v=v, **keywords)
    for have, kept in zip(pages.values(), before, strict=True):
        np.testing.assert_array_equal(have, kept)
