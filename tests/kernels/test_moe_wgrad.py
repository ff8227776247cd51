"""moe_wgrad: the kernels against the mirror, the mirror against a loop in float64, the contract."""

from __future__ import annotations

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import ContractError, DTypeError, ShapeError
from engine.kernels.moe_wgrad import sm90
from engine.reference import Routing
from engine.testing import cases
from engine.testing.cases_elementwise import assert_guards, misaligned
from engine.testing.cases_moe import routing_of
from engine.testing.tolerances import assert_close

# (T, E, k, R, K): one token, few and many per expert, more experts than pairs, more rows than a
# slab or the ring holds, several tiles per CTA that end with either staging buffer, widths that are
# not multiples of a tile or vector, one expert, sizes of 0.
SHAPES = (
    (1, 4, 2, 64, 96),
    (3, 128, 8, 128, 192),
    (17, 8, 1, 72, 264),
    (65, 16, 2, 264, 72),
    (300, 5, 3, 136, 520),
    (700, 3, 2, 320, 328),
    (300, 128, 4, 64, 320),
    (40, 3, 2, 50, 27),
    (9, 1, 1, 8, 16),
    (0, 8, 2, 64, 64),
    (8, 4, 2, 0, 64),
)
ROUTERS = ("random", "one", "few")


def _routing(num_tokens, num_experts, top_k, router="random"):
    """Route tokens to random experts; all to the last ones; to a third of the experts."""
    rng = np.random.default_rng([num_tokens, num_experts, top_k])
    among = {"random": num_experts, "one": top_k, "few": max(top_k, num_experts // 3)}[router]
    names = np.arange(num_experts)[-among:]
    chosen = names[np.argsort(rng.random((num_tokens, among)), axis=1)[:, :top_k]]
    return routing_of(chosen, num_experts, seed=num_tokens)


def _inputs(shape, dtype, gather):
    num_tokens, _, top_k, rows, k = shape
    pairs = num_tokens * top_k
    dy = cases.normal((num_tokens if gather == "dy" else pairs, rows), dtype, seed=1)
    return dy, cases.normal((num_tokens if gather == "x" else pairs, k), dtype, seed=2)


def _on(xp, routing):
    return Routing(*cases.to_module(xp, *routing))


def _loop(dy, x, routing, gather):
    """Return the result pair by pair in float64."""
    top_k = routing.experts.shape[1]
    dw = np.zeros((len(routing.offsets) - 1, dy.shape[1], x.shape[1]))
    for place, pair in enumerate(routing.order):
        of_dy = dy[pair // top_k if gather == "dy" else place].astype(np.float64)
        of_x = x[pair // top_k if gather == "x" else place].astype(np.float64)
        dw[routing.experts.reshape(-1)[pair]] += np.outer(of_dy, of_x)
    return dw


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("gather", ["x", "dy"])
@pytest.mark.grid("shape", SHAPES)
def test_matches_mirror(xp, tier, shape, gather, dtype):
    dy, x = _inputs(shape, dtype, gather)
    for router in ROUTERS:
        routing = _routing(*shape[:3], router)
        want = reference.moe_wgrad(dy, x, routing, gather=gather)
        out, buffer = cases.guarded(xp, want.shape, want.dtype)
        arrays = (*cases.to_module(xp, dy, x), _on(xp, routing))
        got = kernels.moe_wgrad(*arrays, gather=gather, out=out)
        assert got is out
        assert_close(got, want, reduction=max(2, shape[0]), name=router)
        assert_guards(buffer)


@pytest.mark.parametrize("gather", ["x", "dy"])
@pytest.mark.parametrize("shape", SHAPES)
def test_mirror_is_the_loop(shape, gather):
    for dtype in (np.float32, np.float64):
        dy, x = (a.astype(dtype) for a in _inputs(shape, "float32", gather))
        routing = _routing(*shape[:3])
        got = kernels.moe_wgrad(dy, x, routing, gather=gather)
        want = _loop(dy, x, routing, gather)
        limit = 1e-12 if dtype == np.float64 else 3e-5
        np.testing.assert_allclose(got, want, rtol=limit, atol=limit)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_misaligned_and_views(xp, tier, dtype):
    dy, x = _inputs((65, 4, 2, 64, 64), dtype, "x")
    routing = _routing(65, 4, 2)
    want = reference.moe_wgrad(dy, x, routing, gather="x")
    moved = misaligned(xp, dy), misaligned(xp, x)
    assert_close(kernels.moe_wgrad(*moved, _on(xp, routing), gather="x"), want, reduction=65)
    view = xp.asarray(np.repeat(x, 2, axis=1))[:, ::2]
    got = kernels.moe_wgrad(xp.asarray(dy), view, _on(xp, routing), gather="x")
    assert_close(got, want, reduction=65)


@pytest.mark.parametrize("gather", ["x", "dy"])
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_rows_of_other_experts_stay_out(xp, tier, gather, dtype):
    """Infinities of one expert's tokens do not reach another's sum, whose last rows are no slab."""
    dy, x = _inputs((50, 2, 1, 64, 64), dtype, gather)
    routing = routing_of([[0]] * 20 + [[1]] * 30, 2)
    dy[20:] = x[20:] = np.inf
    want = reference.moe_wgrad(dy[:20], x[:20], routing_of([[0]] * 20, 2), gather=gather)
    got = kernels.moe_wgrad(*cases.to_module(xp, dy, x), _on(xp, routing), gather=gather)
    assert_close(got[0], want[0], reduction=20)
    assert bool((got[1] == np.inf).all())


@pytest.mark.gpu
@pytest.mark.grid("dtype", ["bfloat16", "float32"])
def test_the_same_bits_every_time(cp, tier, dtype):
    dy, x = cases.to_module(cp, *_inputs((700, 3, 2, 320, 328), dtype, "x"))
    routing = _on(cp, _routing(700, 3, 2))
    first = to_numpy(kernels.moe_wgrad(dy, x, routing, gather="x"))
    for _ in range(5):
        again = to_numpy(kernels.moe_wgrad(dy, x, routing, gather="x"))
        np.testing.assert_array_equal(first.view(np.uint8), again.view(np.uint8))


def test_the_ring_fits():
    assert sm90._SHARED_BYTES <= 232_448


def test_contract(xp):
    dy, x = xp.zeros((6, 4), np.float16), xp.zeros((3, 8), np.float16)
    routing = _on(xp, _routing(3, 4, 2))
    op = kernels.moe_wgrad
    with pytest.raises(ContractError, match=r"gather: must be one of \('x', 'dy'\); got 'y'"):
        op(dy, x, routing, gather="y")
    with pytest.raises(ShapeError, match=r"x: must have shape \(P, K\); P = 6 from routing.exp"):
        op(dy, x, routing, gather="dy")
    with pytest.raises(DTypeError, match=r"dy: must be float16; got float32"):
        op(dy.astype(np.float32), x, routing, gather="x")
    with pytest.raises(ShapeError, match=r"out: must have shape \(4, 4, 8\); got \(4, 8, 4\)"):
        op(dy, x, routing, gather="x", out=xp.zeros((4, 8, 4), np.float16))
