"""moe_combine: the kernel against the mirror, the mirror against float64, the contract."""

from __future__ import annotations

import numpy as np
import pytest

from engine import kernels, reference
from engine.errors import ContractError, DTypeError, ShapeError
from engine.testing import cases
from engine.testing.cases_elementwise import assert_guards, misaligned
from engine.testing.cases_moe import distinct_logits
from engine.testing.tolerances import assert_close

# (T, k, N): one token, more experts than loads in flight, unvectorizable widths, empty.
SHAPES = (
    (1, 8, 2048),
    (3, 1, 63),
    (17, 2, 576),
    (64, 8, 768),
    (65, 6, 100),
    (5, 16, 1025),
    (2, 9, 2880),
    (300, 4, 1),
    (0, 8, 64),
    (4, 8, 0),
)
EXTRAS = (
    (),
    ("residual",),
    ("shared",),
    ("shared", "shared_gate"),
    ("shared", "shared_gate", "residual"),
)


def _inputs(shape, dtype):
    num_tokens, _, width = shape
    return cases.normal(shape, dtype, seed=1), {
        "shared": cases.normal((num_tokens, width), dtype, seed=2),
        "shared_gate": cases.normal((num_tokens, 1), dtype, seed=3, scale=4.0),
        "residual": cases.normal((num_tokens, width), dtype, seed=4, scale=3.0),
    }


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("extras", EXTRAS, ids="-".join)
@pytest.mark.grid("shape", SHAPES)
def test_matches_mirror(xp, shape, extras, dtype):
    pairs, options = _inputs(shape, dtype)
    options = {name: options[name] for name in extras}
    want = reference.moe_combine(pairs, **options)
    out, buffer = cases.guarded(xp, want.shape, want.dtype)
    on_device = {name: xp.asarray(value) for name, value in options.items()}
    got = kernels.moe_combine(xp.asarray(pairs), **on_device, out=out)
    assert got is out
    assert_close(got, want, reduction=shape[1] + 2)
    assert_guards(buffer)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("into", ["residual", "shared"])
def test_in_place(xp, into, dtype):
    pairs, options = _inputs((9, 3, 136), dtype)
    want = reference.moe_combine(pairs, **options)
    on_device = {name: xp.asarray(value.copy()) for name, value in options.items()}
    got = kernels.moe_combine(xp.asarray(pairs), **on_device, out=on_device[into])
    assert got is on_device[into]
    assert_close(got, want, reduction=5)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_misaligned_and_views(xp, dtype):
    pairs, options = _inputs((6, 4, 64), dtype)
    want = reference.moe_combine(pairs, **options)
    moved = {name: misaligned(xp, value) for name, value in options.items()}
    assert_close(kernels.moe_combine(misaligned(xp, pairs), **moved), want, reduction=6)
    view = xp.asarray(np.repeat(pairs, 2, axis=2))[:, :, ::2]
    on_device = {name: xp.asarray(value) for name, value in options.items()}
    assert_close(kernels.moe_combine(view, **on_device), want, reduction=6)


def _routing(num_tokens, num_experts, top_k):
    logits = distinct_logits(num_tokens, num_experts, seed=6)
    return reference.moe_route(logits, top_k, renormalize=False, scale=6.0)


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("is_added", [True, False])
@pytest.mark.grid("shape", [(1, 4, 2048), (17, 12, 576), (5, 9, 101), (0, 2, 8)])
def test_experts_that_return_their_input(xp, shape, is_added, dtype):
    """Their rows of `pairs` are not read: they may hold anything."""
    num_tokens, top_k, width = shape
    routing = _routing(num_tokens, 20, top_k)
    pairs, options = _inputs(shape, dtype)
    x = cases.normal((num_tokens, width), dtype, seed=7)
    own = {"identity": x} if is_added else {}
    own |= {"num_identity": 8, "residual": options["residual"], "shared": options["shared"]}
    want = reference.moe_combine(pairs, routing=routing, **own)
    pairs[routing.experts >= 12] = np.nan
    on_device = {name: xp.asarray(a) if name != "num_identity" else a for name, a in own.items()}
    routed = type(routing)(*map(xp.asarray, routing))
    got = kernels.moe_combine(xp.asarray(pairs), routing=routed, **on_device)
    assert_close(got, want, reduction=shape[1] + 2)


def test_mirror_adds_the_input_times_its_weight():
    routing = _routing(9, 6, 3)
    pairs, _ = _inputs((9, 3, 5), "float32")
    x = cases.normal((9, 5), "float32", seed=8)
    got = reference.moe_combine(pairs, routing=routing, num_identity=2, identity=x)
    for token, experts in enumerate(routing.experts):
        rows = [
            routing.weights[token, j] * x[token] if expert >= 4 else pairs[token, j]
            for j, expert in enumerate(experts)
        ]
        np.testing.assert_allclose(got[token], np.sum(rows, axis=0), rtol=1e-5, atol=1e-6)
    assert (routing.experts >= 4).any() and (routing.experts < 4).any()


@pytest.mark.gpu
def test_more_rows_than_a_grid_has(cp):
    pairs = cp.ones((70_001, 2, 8), np.float32) * cp.arange(70_001, dtype=np.float32)[:, None, None]
    got = kernels.moe_combine(pairs)
    assert bool((got == 2 * cp.arange(70_001, dtype=np.float32)[:, None]).all())


def test_mirror_is_the_formula():
    pairs, options = _inputs((7, 5, 33), "float32")
    got = reference.moe_combine(pairs, **options)
    gate = 1 / (1 + np.exp(-options["shared_gate"].astype(np.float64)))
    want = pairs.astype(np.float64).sum(axis=1) + options["shared"] * gate + options["residual"]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_far_gates_open_and_close(xp):
    pairs, shared = xp.zeros((3, 2, 8), np.float32), xp.full((3, 8), 5, np.float32)
    gate = xp.asarray(np.array([[-1e4], [0], [1e4]], np.float32))
    got = kernels.moe_combine(pairs, shared=shared, shared_gate=gate)
    assert bool((got == xp.asarray(np.array([[0], [2.5], [5]], np.float32))).all())


def test_contract(xp):
    pairs, row = xp.zeros((3, 2, 8), np.float16), xp.zeros((3, 8), np.float16)
    op = kernels.moe_combine
    with pytest.raises(ShapeError, match=r"pairs: must have shape \(T, k, N\); got \(3, 8\)"):
        op(row)
    with pytest.raises(DTypeError, match=r"shared: must be float16; got float32"):
        op(pairs, shared=row.astype(np.float32))
    with pytest.raises(ShapeError, match=r"residual: must have shape \(T, N\); N = 8 from pairs"):
        op(pairs, residual=row[:, :7])
    with pytest.raises(ContractError, match=r"shared_gate: must be None without shared"):
        op(pairs, shared_gate=row[:, :1])
    with pytest.raises(ShapeError, match=r"shared_gate: must have shape \(T, 1\); got \(3, 8\)"):
        op(pairs, shared=row, shared_gate=row)
    with pytest.raises(ContractError, match=r"routing: must be given with num_identity; got None"):
        op(pairs, num_identity=1)
    with pytest.raises(ContractError, match=r"identity: must be None without num_identity"):
        op(pairs, identity=row)
    routing = type(_routing(3, 4, 2))(*map(xp.asarray, _routing(3, 4, 2)))
    with pytest.raises(ContractError, match=r"num_identity: must be a number from 0 to 4; got 5"):
        op(pairs, routing=routing, num_identity=5)
    with pytest.raises(ShapeError, match=r"out: must have shape \(3, 8\); got \(2, 8\)"):
        op(pairs, out=row[:2])
