"""rope: the kernel against its mirror, the mirror against complex numbers, rotation invariants."""

from __future__ import annotations

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import ContractError, DTypeError, ShapeError
from engine.kernels.rope import Config, choose_config
from engine.testing import cases
from engine.testing.cases_elementwise import ROPE, assert_guards, cos_sin_table
from engine.testing.tolerances import assert_close

_POSITIONS = 97
_TERMS = 2  # every feature is a sum of two products


def _inputs(case, dtype):
    tokens, heads, kv_heads, head_dim, rotary_dim = case
    q = cases.normal((tokens, heads, head_dim), dtype, seed=1)
    k = cases.normal((tokens, kv_heads, head_dim), dtype, seed=2)
    positions = np.random.default_rng(3).integers(0, _POSITIONS, tokens).astype(np.int32)
    return q, k, positions, cos_sin_table(_POSITIONS, rotary_dim)


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("interleaved", [False, True])
@pytest.mark.grid("case", ROPE)
def test_matches_mirror(xp, case, interleaved, dtype):
    q, k, positions, table = _inputs(case, dtype)
    want = reference.rope(q, k, positions, table, interleaved=interleaved)
    q_out, q_buffer = cases.guarded(xp, q.shape, q.dtype)
    k_out, k_buffer = cases.guarded(xp, k.shape, k.dtype)
    arrays = cases.to_module(xp, q, k, positions, table)
    got = kernels.rope(*arrays, interleaved=interleaved, out=(q_out, k_out))
    assert got[0] is q_out and got[1] is k_out
    fresh = kernels.rope(*arrays, interleaved=interleaved)
    for i, name in enumerate("qk"):
        assert_close(got[i], want[i], reduction=_TERMS, name=name)
        assert_close(fresh[i], want[i], reduction=_TERMS, name=name)
    assert_guards(q_buffer)
    assert_guards(k_buffer)


def _split(qkv, case):
    """Return the q, k and v views of fused rows ((H + 2K) * D)."""
    tokens, heads, kv_heads, head_dim, _ = case
    rows = qkv.reshape(tokens, heads + 2 * kv_heads, head_dim)
    return rows[:, :heads], rows[:, heads : heads + kv_heads], rows[:, heads + kv_heads :]


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("interleaved", [False, True])
@pytest.mark.grid("case", ROPE[:-1])
def test_views_of_fused_rows(xp, case, interleaved, dtype):
    """In place, and between fused buffers: neighbouring columns stay unchanged."""
    tokens, heads, kv_heads, head_dim, _ = case
    _, _, positions, table = _inputs(case, dtype)
    qkv = cases.normal((tokens, (heads + 2 * kv_heads) * head_dim), dtype, seed=4)
    want = qkv.copy()
    q, k, _ = _split(want, case)
    q[...], k[...] = reference.rope(q, k, positions, table, interleaved=interleaved)

    gpositions, gtable = cases.to_module(xp, positions, table)
    same, other = xp.array(qkv), xp.array(qkv)
    q, k, _ = _split(same, case)
    into_q, into_k, _ = _split(other, case)
    kernels.rope(q, k, gpositions, gtable, interleaved=interleaved, out=(into_q, into_k))
    np.testing.assert_array_equal(to_numpy(same), qkv)
    kernels.rope(q, k, gpositions, gtable, interleaved=interleaved, out=(q, k))
    assert_close(same, want, reduction=_TERMS, name="in place")
    assert_close(other, want, reduction=_TERMS, name="into another buffer")
    np.testing.assert_array_equal(to_numpy(_split(same, case)[2]), _split(qkv, case)[2])


@pytest.mark.parametrize("interleaved", [False, True])
def test_only_q_in_place(xp, interleaved):
    q, k, positions, table = _inputs((3, 2, 2, 32, 16), "float32")
    want = reference.rope(q, k, positions, table, interleaved=interleaved)
    gq, gk, gp, gt = cases.to_module(xp, q.copy(), k, positions, table)
    k_out, buffer = cases.guarded(xp, k.shape, k.dtype)
    kernels.rope(gq, gk, gp, gt, interleaved=interleaved, out=(gq, k_out))
    assert_close(gq, want[0], reduction=_TERMS)
    assert_close(k_out, want[1], reduction=_TERMS)
    assert_guards(buffer)


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("interleaved", [False, True])
@pytest.mark.grid("case", ROPE)
def test_inverse_matches_mirror(xp, case, interleaved, dtype):
    q, k, positions, table = _inputs(case, dtype)
    options = {"interleaved": interleaved, "inverse": True}
    want = reference.rope(q, k, positions, table, **options)
    gq, gk, gp, gt = cases.to_module(xp, q.copy(), k.copy(), positions, table)
    fresh = kernels.rope(gq, gk, gp, gt, **options)
    kernels.rope(gq, gk, gp, gt, **options, out=(gq, gk))
    for got, again, y in zip((gq, gk), fresh, want, strict=True):
        assert_close(got, y, reduction=_TERMS)
        np.testing.assert_array_equal(to_numpy(got), to_numpy(again))


@pytest.mark.parametrize("interleaved", [False, True])
def test_inverse_is_the_transposed_map(interleaved):
    """<rope(x), y> = <x, inverse(y)> for all x and y: `inverse` computes the gradient."""
    q, k, positions, table = _inputs((4, 3, 2, 12, 8), "float32")
    q, k = q.astype(np.float64), k.astype(np.float64)
    dq, dk = np.random.default_rng(5).standard_normal((2, *q.shape))
    options = {"interleaved": interleaved}
    for x, dy in ((q, dq), (k, dk[:, :2])):
        y = kernels.rope(x, x, positions, table, **options)[0]
        dx = kernels.rope(dy, dy, positions, table, **options, inverse=True)[0]
        np.testing.assert_allclose(np.sum(y * dy), np.sum(x * dx), rtol=1e-12)
        back = kernels.rope(y, y, positions, table, **options, inverse=True)[0]
        np.testing.assert_allclose(back, x, rtol=0, atol=1e-6)  # the table has float32's precision


@pytest.mark.parametrize("interleaved", [False, True])
def test_mirror_is_complex_multiplication(interleaved):
    """Rotate pair (a, b) as (a + ib) exp(i angle) in float64, pair by pair."""
    q, k, positions, table = _inputs((4, 3, 2, 12, 8), "float32")
    got = reference.rope(q, k, positions, table, interleaved=interleaved)
    for x, y in zip((q, k), got, strict=True):
        want = x.astype(np.float64)
        for t, position in enumerate(positions):
            for i in range(4):
                a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + 4)
                turn = np.exp(1j * float(position) * 10000.0 ** (-i / 4))
                z = (x[t, :, a].astype(np.float64) + 1j * x[t, :, b]) * turn
                want[t, :, a], want[t, :, b] = z.real, z.imag
        np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
def test_norms_are_kept_and_only_distance_counts(xp, interleaved):
    q, k, _, table = _inputs((16, 2, 2, 64, 64), "float32")
    near, far = (np.arange(s, s + 16, dtype=np.int32) for s in (0, 80))
    gq, gk, gn, gf, gt = cases.to_module(xp, q, k, near, far, table)

    def scores(positions):
        a, b = kernels.rope(gq, gk, positions, gt, interleaved=interleaved)
        a, b = to_numpy(a), to_numpy(b)
        assert_close(np.linalg.norm(a, axis=-1), np.linalg.norm(q, axis=-1), reduction=64)
        return np.einsum("ihd,jhd->hij", a, b)

    assert_close(scores(gf), scores(gn), reduction=64)


def test_config_is_a_pure_function():
    def config(head_dim, rotary_dim, **kwargs):
        defaults = {"vector_width": 8, "can_vectorise": True, "in_place": False}
        return choose_config(head_dim, rotary_dim, **{**defaults, **kwargs})

    assert config(64, 64) == Config(8, 4)
    assert config(128, 96, in_place=True) == Config(8, 6)
    assert config(80, 24) == Config(1, 12 + 56)  # 12 pairs: not a multiple of 8
    assert config(128, 128, can_vectorise=False) == Config(1, 64)


def test_contract(xp):
    q, k, positions, table = cases.to_module(xp, *_inputs((2, 4, 2, 8, 8), "float32"))
    with pytest.raises(ShapeError, match=r"k: must have shape \(T, K, D\); T = 2 from q"):
        kernels.rope(q, k[:1], positions, table)
    with pytest.raises(DTypeError, match="positions: must be int32; got int64"):
        kernels.rope(q, k, positions.astype(np.int64), table)
    with pytest.raises(DTypeError, match="cos_sin: must be float32; got float16"):
        kernels.rope(q, k, positions, table.astype(np.float16))
    with pytest.raises(ContractError, match=r"cos_sin: must be \(P, R\), R even and at most D = 8"):
        kernels.rope(q, k, positions, table[:, :7])
    with pytest.raises(ContractError, match=r"cos_sin: must be .* got \(2, 10\)"):
        kernels.rope(q, k, positions, xp.zeros((2, 10), np.float32))
    with pytest.raises(ContractError, match=r"out: must be None or a pair"):
        kernels.rope(q, k, positions, table, out=q)
    with pytest.raises(ShapeError, match=r"out\[1\]: must have shape"):
        kernels.rope(q, k, positions, table, out=(q, q))


@pytest.mark.parametrize("position", [-1, _POSITIONS, 2**31 - 1, -(2**31)])
def test_position_outside_the_table(xp, position):
    q, k, positions, table = _inputs((3, 2, 1, 16, 8), "float32")
    positions[1] = position
    arrays = cases.to_module(xp, q, k, positions, table)
    if xp is np:
        with pytest.raises(ContractError, match=r"positions: must be in \[0, 97\)"):
            kernels.rope(*arrays)
        return
    got = to_numpy(kernels.rope(*arrays)[0])
    assert np.isnan(got[1, :, :8]).all()
    np.testing.assert_array_equal(got[:, :, 8:], q[:, :, 8:])
    assert np.isfinite(got[[0, 2]]).all()
