"""clamp: the kernel against its mirror, the mirror against min and max, tails, the contract."""

from __future__ import annotations

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import ContractError, DTypeError
from engine.testing import cases
from engine.testing.cases_elementwise import FLAT_SHAPES, assert_guards, extremes, misaligned
from engine.testing.tolerances import assert_close


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("shape", FLAT_SHAPES)
def test_matches_mirror(xp, shape, dtype):
    x = cases.normal(shape, dtype, seed=1, scale=3.0)
    out, buffer = cases.guarded(xp, shape, x.dtype)
    got = kernels.clamp(xp.asarray(x), -1.7, 2.3, out=out)
    assert got is out
    assert_close(got, reference.clamp(x, -1.7, 2.3))
    assert_guards(buffer)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_views_and_in_place(xp, dtype):
    x = cases.normal((64, 32), dtype, seed=2)
    want = reference.clamp(x, -0.5, 0.5)
    assert_close(kernels.clamp(misaligned(xp, x), -0.5, 0.5), want)
    array = xp.array(x)
    assert kernels.clamp(array, -0.5, 0.5, out=array) is array
    assert_close(array, want)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_extremes(xp, dtype):
    x = extremes(dtype)
    assert_close(kernels.clamp(xp.asarray(x), -2.0, 3.0), reference.clamp(x, -2.0, 3.0))


def test_mirror_is_the_formula():
    x = cases.normal((500,), "float32", seed=3)
    want = np.array([min(max(v, -0.75), 0.5) for v in x.tolist()], np.float32)
    np.testing.assert_array_equal(reference.clamp(x, -0.75, 0.5), want)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_wide_bounds_change_nothing(xp, dtype):
    x = cases.normal((301,), dtype, seed=4)
    np.testing.assert_array_equal(to_numpy(kernels.clamp(xp.asarray(x), -1e30, 1e30)), x)


def test_contract(xp):
    x = xp.zeros((2, 8), np.float32)
    with pytest.raises(DTypeError, match=r"x: must be float32 or .*; got int32"):
        kernels.clamp(x.astype(np.int32), 0.0, 1.0)
    with pytest.raises(ContractError, match=r"high: must be a number from 1\.0 to inf; got 0\.5"):
        kernels.clamp(x, 1.0, 0.5)
