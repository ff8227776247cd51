"""qk_norm_rope_store: the kernel against its mirror, the mirror against the separate ops."""

from __future__ import annotations

import math

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import ContractError, DTypeError, ShapeError
from engine.kernels.qk_norm_rope_store import Config, choose_config
from engine.testing import cases
from engine.testing.cases_elementwise import ROPE, assert_guards, cos_sin_table, misaligned
from engine.testing.tolerances import assert_close

_POSITIONS = 97
_BLOCK_SIZE = 3
_NORMS = ["none", "all", "both", "only_q", "only_k"]


def _inputs(case, dtype, norms="none"):
    """Fused rows, the op's other inputs, and the norm weights; every third token is not stored."""
    tokens, heads, kv_heads, head_dim, rotary_dim = case
    qkv = cases.normal((tokens, (heads + 2 * kv_heads) * head_dim), dtype, seed=1)
    rng = np.random.default_rng(3)
    positions = rng.integers(0, _POSITIONS, tokens).astype(np.int32)
    slots = rng.permutation((tokens + 2) * _BLOCK_SIZE)[:tokens].astype(np.int64)
    slots[2::3] = -1
    weights = {
        f"{name}_weight": cases.normal((head_dim,), dtype, seed=4 + i, scale=0.1, mean=1.0)
        for i, name in enumerate("qkv")
        if norms in ("all", f"only_{name}") or (norms == "both" and name != "v")
    }
    return qkv, (positions, cos_sin_table(_POSITIONS, rotary_dim)), slots, weights


def _split(qkv, case):
    """Return the q, k and v views of fused rows ((H + 2K) * D)."""
    tokens, heads, kv_heads, head_dim, _ = case
    rows = qkv.reshape(tokens, heads + 2 * kv_heads, head_dim)
    return rows[:, :heads], rows[:, heads : heads + kv_heads], rows[:, heads + kv_heads :]


def _pages_shape(case):
    tokens, _, kv_heads, head_dim, _ = case
    return tokens + 2, kv_heads, _BLOCK_SIZE, head_dim


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("norms", _NORMS)
@pytest.mark.grid("norm_after_rope", [False, True])
@pytest.mark.grid("interleaved", [False, True])
@pytest.mark.grid("case", ROPE)
def test_matches_mirror(xp, case, interleaved, norm_after_rope, norms, dtype):
    """Run on views of fused rows; k, v and all unwritten slots stay unchanged."""
    qkv, places, slots, weights = _inputs(case, dtype, norms)
    options = {"interleaved": interleaved, "eps": 1e-5, "weight_offset": 0.5}
    options["norm_after_rope"] = norm_after_rope
    shape = _pages_shape(case)
    want, want_pages = qkv.copy(), np.full((2, *shape), np.nan, qkv.dtype)
    reference.qk_norm_rope_store(
        *_split(want, case), *places, *want_pages, slots, **weights, **options
    )
    buffers = [cases.guarded(xp, shape, qkv.dtype) for _ in "kv"]
    (k_pages, k_buffer), (v_pages, v_buffer) = buffers
    got, *arrays, gslots = cases.to_module(xp, qkv.copy(), *places, slots)
    gweights = {name: xp.asarray(weight) for name, weight in weights.items()}
    result = kernels.qk_norm_rope_store(
        *_split(got, case), *arrays, k_pages, v_pages, gslots, **gweights, **options
    )
    assert result is None
    reduction = case[3] if weights else 2
    assert_close(got, want, reduction=reduction, name="rows")
    for name, pages, wanted in zip("kv", (k_pages, v_pages), want_pages, strict=True):
        host = to_numpy(pages).astype(np.float32)
        is_kept = ~np.isnan(wanted.astype(np.float32))
        np.testing.assert_array_equal(~np.isnan(host), is_kept)
        assert_close(to_numpy(pages)[is_kept], wanted[is_kept], reduction=reduction, name=name)
    assert_guards(k_buffer)
    assert_guards(v_buffer)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("norms", _NORMS)
@pytest.mark.parametrize("tokens", [1, 5, 700])
def test_is_the_separate_ops(xp, tokens, norms, dtype):
    """Bitwise equal without norms; with norms, equal up to summation order."""
    case = (tokens, 6, 2, 64, 64)
    qkv, places, slots, weights = _inputs(case, dtype, norms)
    got, want, *arrays, gslots = cases.to_module(xp, qkv.copy(), qkv.copy(), *places, slots)
    weights = {name: xp.asarray(weight) for name, weight in weights.items()}
    pages, want_pages = (xp.zeros((2, *_pages_shape(case)), qkv.dtype) for _ in "ab")
    kernels.qk_norm_rope_store(*_split(got, case), *arrays, *pages, gslots, **weights)
    q, k, v = _split(want, case)
    if "q_weight" in weights:
        kernels.rmsnorm(q, weights["q_weight"], out=q)
    if "k_weight" in weights:
        kernels.rmsnorm(k, weights["k_weight"], out=k)
    if "v_weight" in weights:
        kernels.rmsnorm(v, weights["v_weight"], out=v)
    kernels.rope(q, k, *arrays, out=(q, k))
    kernels.kv_store(k, v, *want_pages, gslots)
    for a, b in ((_split(got, case)[0], q), (pages, want_pages)):
        a, b = to_numpy(xp.ascontiguousarray(a)), to_numpy(xp.ascontiguousarray(b))
        if weights:
            assert_close(a, b, reduction=64)
        else:
            np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(
        to_numpy(xp.ascontiguousarray(_split(got, case)[1])),
        np.ascontiguousarray(_split(qkv, case)[1]),
    )


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("norms", _NORMS)
@pytest.mark.parametrize("case", [(5, 6, 2, 64, 64), (5, 6, 2, 64, 32), (3, 3, 1, 22, 12)])
def test_the_norm_after_the_rotation_is_that_of_the_rotated_heads(xp, case, norms, interleaved):
    qkv, places, slots, weights = _inputs(case, "float32", norms)
    got, want, *arrays, gslots = cases.to_module(xp, qkv.copy(), qkv.copy(), *places, slots)
    weights = {name: xp.asarray(weight) for name, weight in weights.items()}
    pages, want_pages = (xp.zeros((2, *_pages_shape(case)), qkv.dtype) for _ in "ab")
    options = {"interleaved": interleaved}
    kernels.qk_norm_rope_store(
        *_split(got, case), *arrays, *pages, gslots, **weights, **options, norm_after_rope=True
    )
    q, k, v = _split(want, case)
    kernels.rope(q, k, *arrays, out=(q, k), **options)
    for x, name in ((q, "q_weight"), (k, "k_weight"), (v, "v_weight")):
        if name in weights:
            kernels.rmsnorm(x, weights[name], out=x)
    kernels.kv_store(k, v, *want_pages, gslots)
    for a, b in ((_split(got, case)[0], q), (pages, want_pages)):
        assert_close(xp.ascontiguousarray(a), to_numpy(xp.ascontiguousarray(b)), reduction=64)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("norms", ["none", "both"])
@pytest.mark.parametrize(
    "case", [(1, 6, 2, 64, 64), (700, 5, 2, 128, 96), (3, 2, 1, 22, 12)], ids=str
)
def test_factors_multiply_the_rotated_queries_only(xp, case, norms, dtype):
    """Bitwise equal to `scale_rows` of the queries behind the op without factors."""
    qkv, places, slots, weights = _inputs(case, dtype, norms)
    factors = cases.normal((_POSITIONS,), "float32", seed=9, mean=1.5, scale=0.5)
    got, want, *arrays, gslots, factors = cases.to_module(
        xp, qkv.copy(), qkv.copy(), *places, slots, factors
    )
    weights = {name: xp.asarray(weight) for name, weight in weights.items()}
    pages, want_pages = (xp.zeros((2, *_pages_shape(case)), qkv.dtype) for _ in "ab")
    options = {**weights, "q_factors": factors}
    kernels.qk_norm_rope_store(*_split(got, case), *arrays, *pages, gslots, **options)
    kernels.qk_norm_rope_store(*_split(want, case), *arrays, *want_pages, gslots, **weights)
    rows = want[:, : case[1] * case[3]]
    kernels.scale_rows(rows, factors[arrays[0]], out=rows)
    np.testing.assert_array_equal(to_numpy(got), to_numpy(want))
    np.testing.assert_array_equal(to_numpy(pages), to_numpy(want_pages))
    host = qkv.copy(), np.zeros((2, *_pages_shape(case)), qkv.dtype)
    keywords = {name: to_numpy(array) for name, array in options.items()}
    rows = _split(host[0], case)
    reference.qk_norm_rope_store(*rows, *places, *host[1], slots, **keywords)
    assert_close(got, host[0], reduction=math.inf)  # rounded before the factor and behind it


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_do_not_depend_on_their_number(xp, dtype):
    case = (600, 5, 2, 128, 128)
    qkv, places, slots, weights = _inputs(case, dtype, "both")
    weights = {name: xp.asarray(weight) for name, weight in weights.items()}
    positions, table = cases.to_module(xp, *places)
    many, gslots = cases.to_module(xp, qkv.copy(), slots)
    pages, one_pages = (xp.zeros((2, *_pages_shape(case)), qkv.dtype) for _ in "ab")
    kernels.qk_norm_rope_store(*_split(many, case), positions, table, *pages, gslots, **weights)
    for t in (0, 1, 599):
        row, one = xp.asarray(qkv[t : t + 1].copy()), (1, *case[1:])
        kernels.qk_norm_rope_store(
            *_split(row, one), positions[t : t + 1], table, *one_pages, gslots[t : t + 1], **weights
        )
        np.testing.assert_array_equal(to_numpy(row)[0], to_numpy(many)[t])


def test_misaligned_rows(xp):
    case = (4, 3, 2, 64, 32)
    qkv, places, slots, weights = _inputs(case, "float16", "both")
    want, want_pages = qkv.copy(), np.zeros((2, *_pages_shape(case)), qkv.dtype)
    reference.qk_norm_rope_store(*_split(want, case), *places, *want_pages, slots, **weights)
    got, pages = misaligned(xp, qkv), xp.zeros(want_pages.shape, qkv.dtype)
    weights = {name: xp.asarray(weight) for name, weight in weights.items()}
    arrays = cases.to_module(xp, *places)
    kernels.qk_norm_rope_store(*_split(got, case), *arrays, *pages, xp.asarray(slots), **weights)
    assert_close(got, want, reduction=64)
    assert_close(pages, want_pages, reduction=64)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [(3, 2, 1, 64, 32), (3, 2, 1, 22, 12)])
def test_bad_positions_and_slots_on_the_gpu(cp, case):
    """A position outside the table gives NaN; a slot outside the pages stores nothing."""
    qkv, (positions, table), _, _ = _inputs(case, "float32")
    positions[1] = 10**6
    slots = np.array([0, 5 * _BLOCK_SIZE, 2**40], np.int64)
    got, gp, gt, gs = cases.to_module(cp, qkv.copy(), positions, table, slots)
    pages = cp.zeros((2, *_pages_shape(case)), np.float32)
    kernels.qk_norm_rope_store(*_split(got, case), gp, gt, *pages, gs)
    q = to_numpy(cp.ascontiguousarray(_split(got, case)[0]))
    rotary_dim = case[4]
    assert np.isnan(q[1, :, :rotary_dim]).all()
    assert np.isfinite(q[[0, 2]]).all() and np.isfinite(q[1, :, rotary_dim:]).all()
    pages = to_numpy(pages)
    assert pages[:, 0, :, 0].all()
    pages[:, 0, :, 0] = 0
    assert not pages.any()


def test_config_is_a_pure_function():
    def config(num_tokens, head_dim, rotary_dim, **kwargs):
        defaults = {"vector_width": 8, "can_vectorise": True, "has_norm": False, "num_sms": 132}
        return choose_config(num_tokens, head_dim, rotary_dim, **{**defaults, **kwargs})

    assert config(1, 64, 64) == Config("vector", 32)
    assert config(4096, 128, 128, has_norm=True) == Config("vector", 48)
    assert config(4096, 96, 96) == Config("vector", 63)
    assert config(1, 96, 96, has_norm=True) == Config("scalar", 4)  # 6 threads: not a power of 2
    assert config(1, 128, 96) == Config("vector", 16)
    assert config(1, 80, 24) == Config("scalar", 4)
    assert config(1, 64, 64, can_vectorise=False) == Config("scalar", 4)


def test_contract(xp):
    case = (2, 4, 2, 8, 8)
    qkv, places, slots, _ = _inputs(case, "float32")
    got, *arrays, gslots = cases.to_module(xp, qkv, *places, slots)
    pages = xp.zeros((2, *_pages_shape(case)), np.float32)
    q, k, v = _split(got, case)
    op = kernels.qk_norm_rope_store
    with pytest.raises(ShapeError, match=r"v: must have shape \(T, K, D\); K = 2 from k"):
        op(q, k, v[:, :1], *arrays, *pages, gslots)
    with pytest.raises(DTypeError, match="slot_mapping: must be int64; got int32"):
        op(q, k, v, *arrays, *pages, gslots.astype(np.int32))
    with pytest.raises(DTypeError, match="q_weight: must be float32; got float16"):
        op(q, k, v, *arrays, *pages, gslots, q_weight=xp.ones(8, np.float16))
    with pytest.raises(ShapeError, match=r"k_weight: must have shape \(D,\); D = 8 from q"):
        op(q, k, v, *arrays, *pages, gslots, k_weight=xp.ones(7, np.float32))
    with pytest.raises(ContractError, match="weight_offset: must be a number from -inf to inf; go"):
        op(q, k, v, *arrays, *pages, gslots, weight_offset=float("nan"))
    with pytest.raises(ContractError, match=r"cos_sin: must be \(P, R\), R even and at most D = 8"):
        op(q, k, v, arrays[0], arrays[1][:, :7], *pages, gslots)
    with pytest.raises(ShapeError, match=r"q_factors: must have shape \(P,\); P = 97 from cos_sin"):
        op(q, k, v, *arrays, *pages, gslots, q_factors=xp.ones(96, np.float32))
    with pytest.raises(ShapeError, match="v_pages: must have the strides of k_pages"):
        op(q, k, v, *arrays, pages[0].swapaxes(0, 2).copy().swapaxes(0, 2), pages[1], gslots)


def test_contract_checks_values_on_the_host():
    case = (2, 1, 1, 4, 4)
    qkv, (positions, table), slots, _ = _inputs(case, "float32")
    pages = np.zeros((2, *_pages_shape(case)), np.float32)
    rows = _split(qkv, case)
    with pytest.raises(ContractError, match=r"positions: must be in \[0, 97\)"):
        kernels.qk_norm_rope_store(*rows, positions + np.int32(97), table, *pages, slots)
    with pytest.raises(ContractError, match=r"slot_mapping: must be -1 or in \[0, 12\)"):
        kernels.qk_norm_rope_store(*rows, positions, table, *pages, slots + 12)
