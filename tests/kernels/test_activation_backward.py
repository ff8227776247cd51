"""activation_backward: the kernel against its mirror, the mirror against finite differences."""

from __future__ import annotations

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import ContractError, DTypeError, ShapeError
from engine.testing import cases
from engine.testing.cases_elementwise import FLAT_SHAPES, assert_guards, extremes, misaligned
from engine.testing.tolerances import assert_close

_FORWARD = {
    "silu": kernels.silu,
    "gelu": kernels.gelu,
    "gelu_tanh": lambda x: kernels.gelu(x, approximate="tanh"),
    "relu": kernels.relu,
}


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("activation", _FORWARD)
@pytest.mark.grid("shape", FLAT_SHAPES)
def test_matches_mirror(xp, shape, activation, dtype):
    dout = cases.normal(shape, dtype, seed=1)
    x = cases.normal(shape, dtype, seed=2, scale=3.0)
    out, buffer = cases.guarded(xp, shape, x.dtype)
    got = kernels.activation_backward(*cases.to_module(xp, dout, x), activation, out=out)
    assert got is out
    assert_close(got, reference.activation_backward(dout, x, activation), reduction=2)
    assert_guards(buffer)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("activation", _FORWARD)
def test_views_and_in_place(xp, activation, dtype):
    dout, x = (cases.normal((64, 32), dtype, seed=seed) for seed in (3, 4))
    want = reference.activation_backward(dout, x, activation)
    gdout, gx = (xp.array(a) for a in (dout, x))
    shifted = misaligned(xp, x)
    turned = xp.asarray(np.ascontiguousarray(x.T)).T
    for view in (shifted, turned):
        assert_close(kernels.activation_backward(gdout, view, activation), want, reduction=2)
    for target in (xp.array(x), gdout):
        given = target if target is gdout else xp.array(dout)
        got = kernels.activation_backward(given, gx, activation, out=target)
        assert got is target
        assert_close(target, want, reduction=2)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("activation", _FORWARD)
def test_extremes(xp, activation, dtype):
    x = extremes(dtype)
    if dtype != "float16":
        x = np.append(x, np.array([3e19, -3e19], x.dtype))  # their squares overflow
    dout = np.ones_like(x)
    got = kernels.activation_backward(*cases.to_module(xp, dout, x), activation)
    assert_close(got, reference.activation_backward(dout, x, activation), reduction=2)
    finite = np.isfinite(x.astype(np.float32))
    assert np.isfinite(to_numpy(got).astype(np.float32)[finite]).all()


@pytest.mark.parametrize("activation", _FORWARD)
def test_mirror_is_the_derivative(activation):
    """Central differences in float64, in both tails and between; 0 itself is left out (relu)."""
    x = np.linspace(-12, 12, 198)
    dout = np.random.default_rng(6).standard_normal(198)
    forward = _FORWARD[activation]
    want = dout * (forward(x + 1e-5) - forward(x - 1e-5)) / 2e-5
    got = kernels.activation_backward(dout, x, activation)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-8)


def test_relu_is_flat_at_zero(xp):
    x = xp.asarray(np.array([0.0, -0.0, np.nan], np.float32))
    got = to_numpy(kernels.activation_backward(xp.full(3, 2.0, np.float32), x, "relu"))
    np.testing.assert_array_equal(got, [0.0, 0.0, 2.0])


def test_contract(xp):
    x = xp.zeros((2, 8), np.float32)
    with pytest.raises(ContractError, match="activation: must be one of 'silu', 'gelu', 'gelu_tan"):
        kernels.activation_backward(x, x, "tanh")
    with pytest.raises(DTypeError, match=r"x: must be float32 or .*; got int32"):
        kernels.activation_backward(x, x.astype(np.int32), "silu")
    with pytest.raises(ShapeError, match=r"dout: must have shape \(2, 8\); got \(2, 7\)"):
        kernels.activation_backward(x[:, :7], x, "silu")
    with pytest.raises(ShapeError, match=r"out: must have shape \(2, 8\); got \(2, 4\)"):
        kernels.activation_backward(x, x, "silu", out=x[:, :4])
