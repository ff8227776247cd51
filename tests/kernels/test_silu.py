"""silu: the kernel against its mirror, the mirror against `math`, tails, and the contract."""

from __future__ import annotations

import math

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import DTypeError, ShapeError
from engine.testing import cases
from engine.testing.cases_elementwise import FLAT_SHAPES, assert_guards, extremes, misaligned
from engine.testing.tolerances import assert_close


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("shape", FLAT_SHAPES)
def test_matches_mirror(xp, shape, dtype):
    x = cases.normal(shape, dtype, seed=1, scale=3.0)
    out, buffer = cases.guarded(xp, shape, x.dtype)
    got = kernels.silu(xp.asarray(x), out=out)
    assert got is out
    assert_close(got, reference.silu(x))
    assert_guards(buffer)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_views_and_in_place(xp, dtype):
    x = cases.normal((64, 32), dtype, seed=2)
    want = reference.silu(x)
    assert_close(kernels.silu(misaligned(xp, x)), want)
    assert_close(kernels.silu(xp.asarray(np.ascontiguousarray(x.T)).T), want)
    array = xp.array(x)
    assert kernels.silu(array, out=array) is array
    assert_close(array, want)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_extremes(xp, dtype):
    x = extremes(dtype)
    assert_close(kernels.silu(xp.asarray(x)), reference.silu(x))


def test_mirror_is_the_formula():
    x = cases.normal((500,), "float32", seed=3, scale=5.0)
    want = [v / (1 + math.exp(-v)) for v in x.tolist()]
    np.testing.assert_allclose(reference.silu(x), want, rtol=1e-5, atol=1e-7)


def test_odd_part_is_half_of_x(xp):
    """silu(x) - silu(-x) = x."""
    x = cases.normal((300,), "float32", seed=4, scale=3.0)
    a, b = (to_numpy(kernels.silu(xp.asarray(v))) for v in (x, -x))
    assert_close(a - b, x, reduction=2)


def test_contract(xp):
    x = xp.zeros((2, 8), np.float32)
    with pytest.raises(DTypeError, match=r"x: must be float32 or .*; got int32"):
        kernels.silu(x.astype(np.int32))
    with pytest.raises(DTypeError, match="x: must be an array; got float"):
        kernels.silu(1.0)
    with pytest.raises(ShapeError, match=r"out: must have shape \(2, 8\); got \(2, 4\)"):
        kernels.silu(x, out=x[:, :4])
