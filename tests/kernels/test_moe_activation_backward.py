"""moe_activation_backward: kernel against mirror, mirror against finite differences, contract."""

from __future__ import annotations

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import ContractError, ShapeError
from engine.reference import Routing
from engine.testing import cases
from engine.testing.cases_elementwise import misaligned
from engine.testing.cases_moe import routing_of
from engine.testing.tolerances import assert_close

# (T, E, k, F): one pair, widths that no vector divides, more than a warp covers at once, empty.
SHAPES = ((1, 2, 1, 8), (17, 4, 2, 63), (33, 8, 3, 768), (64, 5, 4, 1000), (0, 4, 2, 64))
ACTIVATIONS = ("swiglu", "swiglu_clamped")


def _inputs(shape, dtype):
    num_tokens, num_experts, top_k, width = shape
    rng = np.random.default_rng(shape)
    chosen = np.argsort(rng.random((num_tokens, num_experts)), axis=1)[:, :top_k]
    routing = routing_of(chosen, num_experts, seed=1)
    dy = cases.normal((num_tokens * top_k, width), dtype, seed=2)
    return dy, cases.normal((num_tokens * top_k, 2 * width), dtype, seed=3, scale=2.0), routing


def _on(xp, routing):
    return Routing(*cases.to_module(xp, *routing))


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("activation", ACTIVATIONS)
@pytest.mark.grid("shape", SHAPES)
def test_matches_mirror(xp, shape, activation, dtype):
    dy, h, routing = _inputs(shape, dtype)
    options = {"activation": activation, "alpha": 1.5, "limit": 1.25}
    want = reference.moe_activation_backward(dy, h, routing, **options)
    arrays = (*cases.to_module(xp, dy, h), _on(xp, routing))
    got = kernels.moe_activation_backward(*arrays, **options)
    for name, a, b in zip(("dh", "scaled", "dweights"), got, want, strict=True):
        assert_close(a, b, reduction=shape[3] if name == "dweights" else 2, name=name)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_misaligned(xp, dtype):
    dy, h, routing = _inputs((33, 8, 3, 64), dtype)
    want = reference.moe_activation_backward(dy, h, routing)
    arrays = misaligned(xp, dy), misaligned(xp, h), _on(xp, routing)
    for a, b in zip(kernels.moe_activation_backward(*arrays), want, strict=True):
        assert_close(a, b, reduction=64)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_mirror_is_the_derivative(activation):
    """Central differences of sum(dy w act(h)) in float64, with values on both sides of clamps."""
    dy, h, routing = _inputs((5, 4, 2, 6), "float32")
    dy, h = dy.astype(np.float64), h.astype(np.float64)
    routing = routing._replace(weights=routing.weights.astype(np.float64))

    def value(h, weights):
        gate, up = np.split(h, 2, axis=1)
        if activation == "swiglu_clamped":
            gate, up = np.minimum(gate, 1.25), np.clip(up, -1.25, 1.25) + 1
        slope = 1.5 if activation == "swiglu_clamped" else 1.0
        y = gate / (1 + np.exp(-slope * gate)) * up
        return np.sum(dy * weights.reshape(-1)[routing.order][:, None] * y)

    options = {"activation": activation, "alpha": 1.5, "limit": 1.25}
    dh, scaled, dweights = kernels.moe_activation_backward(dy, h, routing, **options)
    assert_close(dh, _differences(lambda z: value(z, routing.weights), h), dtype="float32")
    wanted = _differences(lambda z: value(h, z), routing.weights)
    assert_close(dweights, wanted, dtype="float32", reduction=6)
    np.testing.assert_allclose(np.sum(dy * scaled), value(h, routing.weights), 1e-12)


def _differences(function, x, step=1e-6):
    found = np.zeros_like(x)
    for at in np.ndindex(*x.shape):
        ends = []
        for sign in (1, -1):
            moved = x.copy()
            moved[at] += sign * step
            ends.append(function(moved))
        found[at] = (ends[0] - ends[1]) / (2 * step)
    return found


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nan(xp, activation):
    """NaN in `up`: dh is NaN for the gate unless that is clamped, and finite for `up`."""
    dy, h, routing = _inputs((4, 4, 1, 8), "float32")
    h[:, :8], h[0, 0] = 0.5, 9.0
    want, *_ = reference.moe_activation_backward(dy, h, routing, activation=activation)
    h[:, 8] = np.nan
    arrays = (*cases.to_module(xp, dy, h), _on(xp, routing))
    dh, *_ = map(to_numpy, kernels.moe_activation_backward(*arrays, activation=activation))
    is_clamped = activation == "swiglu_clamped"
    assert np.isnan(dh[:, 0]).tolist() == [not is_clamped, True, True, True]
    assert_close(dh[:, 1:], want[:, 1:], reduction=2)


def test_large_gates_stay_finite(xp):
    dy, _, routing = _inputs((4, 4, 1, 8), "float32")
    h = np.full((4, 16), 1e4, np.float32)
    h[:2, :8] = -1e4
    arrays = (*cases.to_module(xp, dy, h), _on(xp, routing))
    dh, scaled, dweights = kernels.moe_activation_backward(*arrays)
    assert all(bool(xp.isfinite(a).all()) for a in (dh, scaled, dweights))
    assert bool((dh[:2] == 0).all()) and bool((scaled[:2] == 0).all())


def test_contract(xp):
    dy, h, routing = _inputs((3, 4, 2, 8), "float32")
    dy, h, routing = *cases.to_module(xp, dy, h), _on(xp, routing)
    op = kernels.moe_activation_backward
    with pytest.raises(ShapeError, match=r"h: must have shape \(P, 16\); got \(6, 8\)"):
        op(dy, dy, routing)
    with pytest.raises(ContractError, match=r"routing.weights: must be of 6 pairs; got \(2, 2\)"):
        op(dy, h, routing._replace(weights=routing.weights[:2]))
    with pytest.raises(ContractError, match=r"activation: must be one of .*; got None"):
        op(dy, h, routing, activation=None)
