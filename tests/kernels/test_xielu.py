"""xielu: the kernel against its mirror, the mirror against `math`, tails, and the contract."""

from __future__ import annotations

import math

import numpy as np
import pytest

from engine import kernels, reference
from engine.errors import DTypeError, ShapeError
from engine.testing import cases
from engine.testing.cases_elementwise import FLAT_SHAPES, assert_guards, extremes, misaligned
from engine.testing.tolerances import assert_close

# Neither the slope nor the other coefficients are equal, so that an exchange would show.
_COEFFICIENTS = np.array([0.9, 1.3, 0.4, -0.02], np.float32)


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("shape", FLAT_SHAPES)
def test_matches_mirror(xp, shape, dtype):
    x = cases.normal(shape, dtype, seed=1, scale=3.0)
    out, buffer = cases.guarded(xp, shape, x.dtype)
    got = kernels.xielu(*cases.to_module(xp, x, _COEFFICIENTS), out=out)
    assert got is out
    assert_close(got, reference.xielu(x, _COEFFICIENTS))
    assert_guards(buffer)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_views_and_in_place(xp, dtype):
    x = cases.normal((64, 32), dtype, seed=2)
    want = reference.xielu(x, _COEFFICIENTS)
    coefficients = xp.asarray(_COEFFICIENTS)
    assert_close(kernels.xielu(misaligned(xp, x), coefficients), want)
    array = xp.array(x)
    assert kernels.xielu(array, coefficients, out=array) is array
    assert_close(array, want)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_extremes(xp, dtype):
    x = extremes(dtype)
    got = kernels.xielu(*cases.to_module(xp, x, _COEFFICIENTS))
    assert_close(got, reference.xielu(x, _COEFFICIENTS))


def test_mirror_is_the_formula():
    positive, negative, slope, eps = _COEFFICIENTS.tolist()

    def formula(v: float) -> float:
        if v > 0:
            return positive * v * v + slope * v
        return negative * (math.expm1(min(v, eps)) - v) + slope * v

    x = cases.normal((500,), "float32", seed=3, scale=2.0)
    want = np.array([formula(v) for v in x.tolist()])
    np.testing.assert_allclose(reference.xielu(x, _COEFFICIENTS), want, rtol=1e-5, atol=1e-6)


def test_both_pieces_meet_at_zero(xp):
    x = np.array([-1e-4, 0.0, 1e-4], np.float32)
    coefficients = np.array([0.8, 0.8, 0.5, -1e-6], np.float32)
    got = kernels.xielu(*cases.to_module(xp, x, coefficients))
    assert_close(got, reference.xielu(x, coefficients))
    assert np.abs(reference.xielu(x, coefficients) - 0.5 * x).max() < 1e-6


def test_contract(xp):
    x = xp.zeros((2, 8), np.float32)
    coefficients = xp.asarray(_COEFFICIENTS)
    with pytest.raises(DTypeError, match=r"x: must be float32 or .*; got int32"):
        kernels.xielu(x.astype(np.int32), coefficients)
    with pytest.raises(DTypeError, match=r"coefficients: must be float32; got float16"):
        kernels.xielu(x, coefficients.astype(np.float16))
    with pytest.raises(ShapeError, match=r"coefficients: must have shape \(4,\); got \(3,\)"):
        kernels.xielu(x, coefficients[:3])
