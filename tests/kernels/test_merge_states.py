"""merge_states: the kernel against its mirror, the mirror against float64, and attention itself."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import ContractError, DTypeError, ShapeError
from engine.testing import cases
from engine.testing.cases_attention import cu_seqlens, normal_on
from engine.testing.cases_elementwise import misaligned
from engine.testing.tolerances import assert_close

# (S, T, H, D): one state, pairs, more than are in flight; unvectorizable widths; wide rows.
SHAPES = (
    (1, 3, 2, 64),
    (2, 5, 32, 128),
    (2, 1, 1, 1),
    (2, 33, 3, 80),
    (3, 7, 4, 63),
    (4, 2, 8, 256),
    (5, 9, 9, 96),
    (11, 4, 2, 20),
    (2, 2, 1, 2100),
    (2, 2, 1, 5001),
    (2, 0, 4, 64),
)


def _states(shape, dtype, *, has_empty=True):
    """Return outputs and log-sum-exps; a third of the states are empty and hold NaN."""
    outputs = cases.normal(shape, dtype, seed=1)
    lses = cases.normal(shape[:3], "float32", seed=2, scale=4.0, mean=3.0)
    if has_empty:
        empty = np.random.default_rng(3).random(lses.shape) < 0.3
        lses[empty], outputs[empty] = -np.inf, np.nan
    return outputs, lses


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("shape", SHAPES)
def test_matches_mirror(xp, shape, dtype):
    outputs, lses = _states(shape, dtype)
    want, want_lse = reference.merge_states(outputs, lses)
    assert np.isfinite(want.astype(np.float32)).all() and not np.isnan(want_lse).any()
    out, buffer = cases.guarded(xp, want.shape, want.dtype)
    got, lse = kernels.merge_states(*cases.to_module(xp, outputs, lses), out=out)
    assert got is out
    assert_close(got, want, reduction=2)
    assert_close(lse, want_lse, reduction=2, name="lse")
    assert bool(xp.isnan(buffer[:64]).all()) and bool(xp.isnan(buffer[-64:]).all())


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("into", [None, 0, 1])
def test_pairs_in_place(xp, into, dtype):
    outputs, lses = _states((2, 6, 5, 64), dtype)
    want, want_lse = reference.merge_states(outputs, lses)
    pair = tuple(cases.to_module(xp, *(x.copy() for x in outputs)))
    out = None if into is None else pair[into]
    got, lse = kernels.merge_states(pair, list(cases.to_module(xp, *lses)), out=out)
    assert out is None or got is out
    assert_close(got, want, reduction=2)
    assert_close(lse, want_lse, reduction=2)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_misaligned(xp, dtype):
    outputs, lses = _states((2, 3, 2, 64), dtype)
    pair = [misaligned(xp, x) for x in outputs]
    got, _ = kernels.merge_states(pair, xp.asarray(lses))
    assert_close(got, reference.merge_states(outputs, lses)[0], reduction=2)


@pytest.mark.gpu
@pytest.mark.parametrize("num_states", [1, 2, 3])
def test_large(cp, num_states):
    """More data than L2 holds: two rows per thread, and a partial last block."""
    shape = (num_states, 5001, 27, 128)
    outputs = normal_on(cp, shape, "bfloat16", 1)
    lses = normal_on(cp, shape[:3], "float32", 2) * 4
    lses[cp.random.default_rng(3).random(lses.shape) < 0.3] = -np.inf
    outputs[cp.isneginf(lses)] = np.nan
    got, lse = kernels.merge_states(outputs, lses)
    for part in (slice(0, 70), slice(2400, 2500), slice(4950, None)):
        states = (to_numpy(x[:, part]) for x in (outputs, lses))
        want, want_lse = reference.merge_states(*states)
        assert_close(got[part], want, reduction=2)
        assert_close(lse[part], want_lse, reduction=2)


def test_mirror_is_the_formula():
    outputs, lses = _states((3, 5, 2, 7), "float32", has_empty=False)
    got, lse = reference.merge_states(outputs, lses)
    weights = np.exp(lses.astype(np.float64))
    want = (weights[..., None] * outputs).sum(axis=0) / weights.sum(axis=0)[..., None]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, np.log(weights.sum(axis=0)), rtol=1e-6)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_empty_and_extreme_states(xp, dtype):
    """All empty: 0 and -inf. One non-empty: its own bits. Any log-sum-exp magnitude works."""
    outputs = cases.normal((3, 4, 1, 8), dtype, seed=4)
    lses = np.array(
        [[-np.inf, -np.inf, 1e30, -1e30], [-np.inf, 2.5, -1e30, -np.inf], [-np.inf] * 4]
    )
    outputs[2], outputs[:, 0] = np.nan, np.nan
    lses = lses.astype(np.float32)[..., None]
    got, lse = map(to_numpy, kernels.merge_states(*cases.to_module(xp, outputs, lses)))
    np.testing.assert_array_equal(got[0], np.zeros((1, 8), outputs.dtype))
    for t, s in ((1, 1), (2, 0), (3, 0)):
        np.testing.assert_array_equal(got[t], outputs[s, t])
    np.testing.assert_array_equal(lse[:, 0], np.array([-np.inf, 2.5, 1e30, -1e30], np.float32))


@pytest.mark.parametrize("cuts", [(0, 40), (1, 17), (40,), (13, 13, 39)])
def test_merged_parts_are_the_whole(xp, cuts):
    """Merging attention over pieces of the keys gives attention over all keys."""
    q, k, v = (cases.normal((n, 2, 16), "float32", seed=n + i) for i, n in enumerate((6, 40, 40)))
    where = {"cu_seqlens_q": cu_seqlens([6]), "causal": False, "return_lse": True}
    want, want_lse = reference.attention_prefill(q, k, v, cu_seqlens_k=cu_seqlens([40]), **where)
    ends = (0, *cuts, 40)
    parts = [
        reference.attention_prefill(q, k[a:b], v[a:b], cu_seqlens_k=cu_seqlens([b - a]), **where)
        for a, b in itertools.pairwise(ends)
    ]
    outputs, lses = (np.stack(x) for x in zip(*parts, strict=True))
    got, lse = kernels.merge_states(*cases.to_module(xp, outputs, lses))
    assert_close(got, want, reduction=40)
    assert_close(lse, want_lse, reduction=40)


def test_contract(xp):
    outputs, lses = xp.zeros((2, 3, 4, 8), np.float16), xp.zeros((2, 3, 4), np.float32)
    op = kernels.merge_states
    with pytest.raises(ShapeError, match=r"lses: must have shape \(S, T, H\); H = 4 from outputs"):
        op(outputs, lses[:, :, :3])
    with pytest.raises(DTypeError, match="lses: must be float32; got float16"):
        op(outputs, lses.astype(np.float16))
    with pytest.raises(ShapeError, match=r"outputs\[1\]: must have shape \(T, H, D\); T = 3 from"):
        op((outputs[0], outputs[1, :2]), lses)
    with pytest.raises(DTypeError, match=r"outputs\[1\]: must be float16; got float32"):
        op((outputs[0], outputs[1].astype(np.float32)), lses)
    with pytest.raises(ContractError, match="outputs: must be one array or a pair; got '3 arrays'"):
        op((outputs[0],) * 3, lses)
    with pytest.raises(ContractError, match="outputs: must be of one state or more"):
        op(outputs[:0], lses[:0])
    with pytest.raises(
        ContractError, match="lses: must be of S = 1 states, as outputs; got 'a pair'"
    ):
        op(outputs[:1], (lses[0], lses[1]))
    pair = outputs[0], outputs[1]
    with pytest.raises(
        ShapeError, match=r"lses: must have shape \(S, T, H\); S = 2 from outputs; got \(3, 3"
    ):
        op(pair, xp.zeros((3, 3, 4), np.float32))
    with pytest.raises(ContractError, match="outputs: must be of D = 1 or more; got 0"):
        op(outputs[..., :0], lses)
    with pytest.raises(ShapeError, match="out: must have shape"):
        op(outputs, lses, out=xp.zeros((3, 4, 7), np.float16))
