"""attention_prefill_fp8: the kernels against mirror and float64, both tiers, the contract."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import ContractError, DTypeError, ShapeError
from engine.kernels.attention_prefill_fp8 import sm90 as prefill_fp8_sm90
from engine.kernels.attention_prefill_fp8.sm90 import choose_fp8_tile
from engine.testing import cases
from engine.testing.cases_attention import AttentionCase, cu_seqlens

_E4M3 = ml_dtypes.float8_e4m3fn
_HALVES = ("float16", "bfloat16")
# Relative rms error of P in e4m3: 2.7 % rounded, 3.2 % if interpolated linearly; sums over keys
# keep it.
_ERROR = 0.05
_LSE_ERROR = 0.15  # one e4m3 step, if one key has all the weight

_CASES = [
    AttentionCase((1,), (1,)),
    AttentionCase((1, 2, 63, 64, 65), (1, 127, 128, 129, 257), 3, 3),
    AttentionCase((191, 192, 193, 0), (191, 192, 193, 0), 4, 4),
    AttentionCase((0, 5, 0), (10, 0, 0)),
    AttentionCase((40, 3), (7, 300), 8, 2),
    AttentionCase((70, 33), (70, 200), causal=False),
    AttentionCase((129, 17), (640, 17), 9, 3),
    AttentionCase((70, 33), (70, 200), 6, 1, 128),
    AttentionCase((70, 33), (70, 200), 2, 2, 96, causal=False, scale=0.3),
    AttentionCase((70, 33), (70, 200), 2, 1, 48),
    AttentionCase((30, 9), (70, 40), 2, 1, 192),
    AttentionCase((30, 9), (70, 40), 2, 2, 36),
]


def _arguments(case, seed=0, spread=1.0):
    """Return codes and scales by name, and the sequence bounds."""
    lens = {"q": case.lens_q, "k": case.lens_k, "v": case.lens_k}
    named = {}
    for i, (name, length) in enumerate(lens.items()):
        heads = case.num_heads if name == "q" else case.num_kv_heads
        x = cases.normal((sum(length), heads, case.head_dim), "float32", seed + i)
        named[name], named[f"{name}_scale"] = reference.quantize_heads(x)
    named["q_scale"] = named["q_scale"] * np.float32(spread)
    named["cu_seqlens_q"], named["cu_seqlens_k"] = cu_seqlens(case.lens_q), cu_seqlens(case.lens_k)
    return named


def _run(xp, named, case, dtype="bfloat16", **options):
    options = {"causal": case.causal, "scale": case.scale, "dtype": dtype} | options
    arrays = {name: xp.asarray(x) for name, x in named.items()}
    return kernels.attention_prefill_fp8(**arrays, **options, return_lse=True)


def _float64(named, case):
    """Return softmax(scores) V and the log-sum-exp of all sequences, in float64."""
    q, k, v = (
        named[x].view(_E4M3).astype(np.float64) * named[f"{x}_scale"][:, None] for x in "qkv"
    )
    group = case.num_heads // case.num_kv_heads
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    out, lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
    for b, (n, m) in enumerate(zip(case.lens_q, case.lens_k, strict=True)):
        rows, keys = (slice(*named[f"cu_seqlens_{x}"][b : b + 2]) for x in "qk")
        if m == 0:
            continue
        score = np.einsum("ihd,jhd->hij", q[rows], np.repeat(k[keys], group, 1)) * scale
        if case.causal:
            score[:, np.arange(m) > np.arange(m - n, m)[:, None]] = -np.inf
        top = np.maximum(score.max(-1, keepdims=True, initial=-np.inf), -1e30)
        p = np.exp(score - top)
        total = p.sum(-1, keepdims=True)
        weights = np.divide(p, total, out=np.zeros_like(p), where=total > 0)
        out[rows] = np.einsum("hij,jhd->ihd", weights, np.repeat(v[keys], group, 1))
        with np.errstate(divide="ignore"):
            lse[rows] = (np.log(total) + top)[..., 0].T
    return out, lse


def _check(got, want, lse, want_lse):
    got, want = to_numpy(got).astype(np.float64), want.astype(np.float64)
    assert got.shape == want.shape and np.isfinite(got).all()
    assert np.linalg.norm(got - want) <= _ERROR * np.linalg.norm(want)
    seen = np.isfinite(want_lse)
    lse = to_numpy(lse)
    np.testing.assert_array_equal(np.isneginf(lse), ~seen)
    np.testing.assert_allclose(lse[seen], want_lse[seen], atol=_LSE_ERROR, rtol=0)
    assert (got[~seen] == 0).all()


@pytest.mark.grid("dtype", _HALVES)
@pytest.mark.grid("case", _CASES, ids=str)
def test_matches_mirror(xp, case, dtype):
    named = _arguments(case)
    out, guards = cases.guarded(xp, named["q"].shape, cases.normal((1,), dtype, 0).dtype)
    got, lse = _run(xp, named, case, dtype, out=out)
    assert got is out
    assert bool(xp.isnan(guards[:64]).all()) and bool(xp.isnan(guards[-64:]).all())
    options = {"causal": case.causal, "scale": case.scale, "dtype": dtype, "return_lse": True}
    _check(got, *_pair(reference.attention_prefill_fp8(**named, **options), lse))


def _pair(want, lse):
    return want[0], lse, want[1]


@pytest.mark.parametrize("case", _CASES, ids=str)
def test_mirror_against_float64(case):
    named = _arguments(case, seed=10)
    out, lse = reference.attention_prefill_fp8(
        **named, causal=case.causal, scale=case.scale, return_lse=True
    )
    _check(out, *_pair(_float64(named, case), lse))


_BORDERS = (0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 257, 400)


def _random_case(rng):
    batch = int(rng.integers(1, 6))
    lens_q = rng.choice(_BORDERS, batch)
    lens_k = np.where(rng.random(batch) < 0.7, lens_q + rng.choice(_BORDERS, batch), lens_q // 2)
    lens_q[0], lens_k[0] = max(lens_q[0], 1), max(lens_k[0], 1)
    kv_heads, group = int(rng.integers(1, 4)), int(rng.choice([1, 2, 3, 4, 7, 8]))
    return AttentionCase(
        tuple(map(int, lens_q)),
        tuple(map(int, lens_k)),
        kv_heads * group,
        kv_heads,
        int(rng.choice([16, 48, 64, 64, 80, 128, 128])),
        causal=bool(rng.random() < 0.6),
    )


@pytest.mark.gpu
@pytest.mark.grid("seed", range(25))
def test_random_problems(cp, seed, tier):
    rng = np.random.default_rng(seed)
    case = _random_case(rng)
    named = _arguments(case, seed, spread=float(rng.choice([0.1, 1.0, 4.0])))
    want = _float64(named, case)
    got, lse = _run(cp, named, case, _HALVES[seed % 2])
    _check(got, *_pair(want, lse))


@pytest.mark.gpu
@pytest.mark.parametrize("mean", [0.0, 2.0])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("num_keys", [2048, 16384])
def test_error_does_not_grow_with_the_keys(cp, num_keys, head_dim, mean):
    """FP8 tensor cores accumulate about 14 bits, so long sums must be promoted to float32."""
    case = AttentionCase((70,), (num_keys,), 2, 2, head_dim, causal=False)
    named = _arguments(case, seed=12)
    v = cases.normal((num_keys, 2, head_dim), "float32", 13) + np.float32(mean)
    named["v"], named["v_scale"] = reference.quantize_heads(v)
    want, want_lse = _float64(named, case)
    got, lse = _run(cp, named, case)
    _check(got, want, lse, want_lse)
    assert np.abs(to_numpy(lse) - want_lse).mean() < 0.01
    error = np.linalg.norm((to_numpy(got) - want).mean(axis=0))
    assert error <= 0.015 * np.linalg.norm(want.mean(axis=0)) or mean == 0


@pytest.mark.parametrize("growth", [0.02, 0.5, -0.5])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_scores_that_grow_or_fall_with_the_key(xp, growth, head_dim):
    """The softmax base must be raised often, rarely, or never."""
    n = 700
    case = AttentionCase((n,), (n,), 2, 2, head_dim)
    named = _arguments(case, seed=4)
    ramp = np.broadcast_to(growth * np.arange(n)[:, None, None], (n, 2, head_dim)) / head_dim
    for name, x in (("q", np.ones((n, 2, head_dim))), ("k", ramp)):
        named[name], named[f"{name}_scale"] = reference.quantize_heads(x.astype(np.float32))
    named["q_scale"] = named["q_scale"] * np.float32(head_dim**0.5)
    got, lse = _run(xp, named, case)
    _check(got, *_pair(_float64(named, case), lse))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_nan_stays_where_it_is(xp, head_dim):
    """NaN beyond a sequence has no effect; NaN inside affects exactly the queries that see it."""
    lens = (100, 150, 70)
    case = AttentionCase(lens, lens, 2, 2, head_dim, causal=False)
    named = _arguments(case, seed=5)
    clean, _ = _run(xp, named, case)
    for name in "qkv":
        named[name] = named[name].copy()
        named[name][:100] = 0x7F
        named[name][250:] = 0x7F
    got, _ = _run(xp, named, case)
    inside = slice(100, 250)
    np.testing.assert_array_equal(
        to_numpy(got)[inside].view(np.uint16), to_numpy(clean)[inside].view(np.uint16)
    )
    assert bool(xp.isnan(got[:100]).all()) and bool(xp.isnan(got[250:]).all())
    for key in (100, 117, 249):
        one = named | {"k": named["k"].copy()}
        one["k"][key, 0, 5] = 0x7F
        got, _ = _run(xp, one, case)
        assert bool(xp.isnan(got[inside, 0]).all()) and not bool(xp.isnan(got[inside, 1]).any())


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_row_has_the_same_bits_in_any_company(cp, head_dim):
    case = AttentionCase((1700, 70), (1700, 1333), 8, 2, head_dim)
    named = _arguments(case, seed=6, spread=3.0)
    whole, _ = _run(cp, named, case)
    again, _ = _run(cp, named, case)
    assert bool((whole.view(np.uint16) == again.view(np.uint16)).all())
    part = {name: x for name, x in named.items() if name.endswith("_scale")}
    part["q"], part["k"], part["v"] = (named[x][1700:] for x in "qkv")
    part["cu_seqlens_q"], part["cu_seqlens_k"] = cu_seqlens([70]), cu_seqlens([1333])
    alone, _ = _run(cp, part, case)
    assert bool((alone.view(np.uint16) == whole[1700:].view(np.uint16)).all())
    # The last rows as a separate chunk: tiles begin at other tokens.
    part["q"], part["cu_seqlens_q"] = named["q"][1737:], cu_seqlens([33])
    tail, _ = _run(cp, part, case)
    assert bool((tail.view(np.uint16) == whole[1737:].view(np.uint16)).all())
    # A query is among a tile's first rows, later its last row.
    first = {name: x for name, x in named.items() if name.endswith("_scale")}
    first |= {x: named[x][:1500] for x in "kv"} | {"q": named["q"][1399:1500]}
    first["cu_seqlens_q"], first["cu_seqlens_k"] = cu_seqlens([101]), cu_seqlens([1500])
    head, _ = _run(cp, first, case)
    assert bool((head.view(np.uint16) == whole[1399:1500].view(np.uint16)).all())


def test_heads_of_fused_rows(xp):
    """q, k and v as views of one array, and codes as float8 if NumPy supports it."""
    case = AttentionCase((50,), (50,), 4, 2)
    named = _arguments(case, seed=7)
    want, _ = _run(xp, named, case)
    fused = xp.asarray(np.concatenate([named[x] for x in "qkv"], 1).reshape(50, -1))
    arrays = {name: xp.asarray(x) for name, x in named.items()}
    for name, begin, heads in (("q", 0, 4), ("k", 4, 2), ("v", 6, 2)):
        view = fused[:, 64 * begin : 64 * (begin + heads)].reshape(50, heads, 64)
        assert xp.may_share_memory(view, fused)
        arrays[name] = view.view(_E4M3) if xp is np else view
    got = kernels.attention_prefill_fp8(**arrays)
    np.testing.assert_array_equal(to_numpy(got).view(np.uint16), to_numpy(want).view(np.uint16))


def test_error_from_the_first_array_on(xp):
    """Quantizing Q, K, V and P costs about 5 % relative error on normal inputs."""
    case = AttentionCase((300,), (300,), 2, 2, causal=False)
    arrays = [cases.normal((300, 2, 64), "float32", seed) for seed in (8, 9, 10)]
    exact = dict(zip("qkv", arrays, strict=True))
    named = {}
    for name, x in exact.items():
        codes, scale = kernels.quantize_heads(xp.asarray(x), rotate=name != "v")
        named |= {name: codes, f"{name}_scale": scale}
    ends = cu_seqlens([300])
    got, _ = _run(xp, named | {"cu_seqlens_q": ends, "cu_seqlens_k": ends}, case)
    score = np.einsum("ihd,jhd->hij", exact["q"], exact["k"], dtype=np.float64) / 8
    p = np.exp(score - score.max(-1, keepdims=True))
    want = np.einsum("hij,jhd->ihd", p / p.sum(-1, keepdims=True), exact["v"])
    error = np.linalg.norm(to_numpy(got).astype(np.float64) - want) / np.linalg.norm(want)
    assert 0.01 < error < 0.08


def test_tile_is_a_pure_function():
    assert choose_fp8_tile(64).head_dim == 64 and choose_fp8_tile(16).head_dim == 64
    assert choose_fp8_tile(80).head_dim == 128
    assert choose_fp8_tile(144) is None and choose_fp8_tile(72) is None
    assert all(tile.shared_bytes <= 227 * 1024 for tile in prefill_fp8_sm90._TILES)


def test_contract(xp):
    case = AttentionCase((4,), (4,))
    arrays = {name: xp.asarray(x) for name, x in _arguments(case).items()}

    def call(**changed):
        return kernels.attention_prefill_fp8(**(arrays | changed))

    with pytest.raises(DTypeError, match="q: must be uint8 or float8_e4m3fn; got float32"):
        call(q=arrays["q"].astype(np.float32))
    with pytest.raises(
        ShapeError, match=r"q_scale: must have shape \(H,\); H = 4 from q; got \(2,"
    ):
        call(q_scale=arrays["k_scale"])
    with pytest.raises(DTypeError, match="v_scale: must be float32"):
        call(v_scale=arrays["v_scale"].astype(np.float16))
    with pytest.raises(DTypeError, match="dtype: must be one of"):
        call(dtype="float32")
    with pytest.raises(
        DTypeError, match=r"attention_prefill_fp8: dtype: must be one of \('float16'"
    ):
        call(dtype=np.dtype(np.float16))
    with pytest.raises(ContractError, match="scale: must be from 1e-18 to 1e18; got 1e-300"):
        call(scale=1e-300)
    with pytest.raises(ContractError, match="scale: must be positive and finite"):
        call(scale=-1.0)
    with pytest.raises(ContractError, match="K: must be a divisor"):
        call(q=arrays["q"][:, :3], q_scale=arrays["q_scale"][:3])
    if xp is np:
        with pytest.raises(ContractError, match="cu_seqlens_k: must be rising from 0 to 4"):
            call(cu_seqlens_k=cu_seqlens([3]))
        for name in ("q_scale", "k_scale", "v_scale"):
            for factor in (0, -1):
                with pytest.raises(ContractError, match=f"{name}: must be positive; got"):
                    call(**{name: arrays[name] * np.float32(factor)})
