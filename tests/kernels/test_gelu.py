"""gelu: the kernel against its mirror, the mirror against `math`, tails, and the contract."""

from __future__ import annotations

import math

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import ContractError, DTypeError, ShapeError
from engine.reference import _activation
from engine.testing import cases
from engine.testing.cases_elementwise import FLAT_SHAPES, assert_guards, extremes, misaligned
from engine.testing.tolerances import assert_close

_APPROXIMATE = ("none", "tanh")


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("approximate", _APPROXIMATE)
@pytest.mark.grid("shape", FLAT_SHAPES)
def test_matches_mirror(xp, shape, approximate, dtype):
    x = cases.normal(shape, dtype, seed=1, scale=3.0)
    out, buffer = cases.guarded(xp, shape, x.dtype)
    got = kernels.gelu(xp.asarray(x), approximate=approximate, out=out)
    assert got is out
    assert_close(got, reference.gelu(x, approximate=approximate))
    assert_guards(buffer)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("approximate", _APPROXIMATE)
def test_views_and_in_place(xp, approximate, dtype):
    x = cases.normal((64, 32), dtype, seed=2)
    want = reference.gelu(x, approximate=approximate)
    assert_close(kernels.gelu(misaligned(xp, x), approximate=approximate), want)
    assert_close(
        kernels.gelu(xp.asarray(np.ascontiguousarray(x.T)).T, approximate=approximate), want
    )
    array = xp.array(x)
    assert kernels.gelu(array, approximate=approximate, out=array) is array
    assert_close(array, want)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("approximate", _APPROXIMATE)
def test_extremes(xp, approximate, dtype):
    x = extremes(dtype)
    assert_close(
        kernels.gelu(xp.asarray(x), approximate=approximate),
        reference.gelu(x, approximate=approximate),
    )


def test_mirror_is_the_formula():
    x = np.concatenate([cases.normal((500,), "float32", seed=3, scale=4.0), [-13.0, 13.0]])
    x = x.astype(np.float32)
    exact = [v * math.erfc(-v * math.sqrt(0.5)) / 2 for v in x.tolist()]
    np.testing.assert_allclose(reference.gelu(x), exact, rtol=1e-5, atol=1e-9)
    u = np.sqrt(2 / np.pi) * (x.astype(np.float64) + 0.044715 * x.astype(np.float64) ** 3)
    got = reference.gelu(x, approximate="tanh")
    np.testing.assert_allclose(got, x * (1 + np.tanh(u)) / 2, rtol=1e-5, atol=1e-6)


def test_mirror_reaches_its_stated_error():
    x = np.linspace(-3, 3, 10001, dtype=np.float32)
    want = np.vectorize(math.erfc)(x.astype(np.float64))
    error = np.abs(_activation.erfc(x) - want)
    assert (error / want).max() < 2e-6 and error.max() < 4e-7


@pytest.mark.parametrize("approximate", _APPROXIMATE)
def test_odd_part_is_half_of_x(xp, approximate):
    """gelu(x) - gelu(-x) = x."""
    x = cases.normal((300,), "float32", seed=4, scale=2.0)
    a, b = (to_numpy(kernels.gelu(xp.asarray(v), approximate=approximate)) for v in (x, -x))
    assert_close(a - b, x, reduction=2)


def test_contract(xp):
    x = xp.zeros((2, 8), np.float32)
    with pytest.raises(DTypeError, match=r"x: must be float32 or .*; got int32"):
        kernels.gelu(x.astype(np.int32))
    with pytest.raises(DTypeError, match="x: must be an array; got float"):
        kernels.gelu(1.0)
    with pytest.raises(ShapeError, match=r"out: must have shape \(2, 8\); got \(2, 4\)"):
        kernels.gelu(x, out=x[:, :4])
    with pytest.raises(ContractError, match="approximate: must be 'none' or 'tanh'; got 'erf'"):
        kernels.gelu(x, approximate="erf")
