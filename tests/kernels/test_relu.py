"""relu, plain and squared: the kernel, its mirror against max(), tails, and the contract."""

from __future__ import annotations

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import ContractError, DTypeError, ShapeError
from engine.testing import cases
from engine.testing.cases_elementwise import FLAT_SHAPES, assert_guards, extremes, misaligned
from engine.testing.tolerances import assert_close

SQUARED = (False, True)


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("shape", FLAT_SHAPES)
@pytest.mark.grid("squared", SQUARED)
def test_matches_mirror(xp, squared, shape, dtype):
    x = cases.normal(shape, dtype, seed=1, scale=3.0)
    out, buffer = cases.guarded(xp, shape, x.dtype)
    got = kernels.relu(xp.asarray(x), squared=squared, out=out)
    assert got is out
    assert_close(got, reference.relu(x, squared=squared))
    assert_guards(buffer)


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("shape", [(1, 8), (3, 576), (17, 126), (300, 2), (0, 16), (2, 3, 64)])
@pytest.mark.grid("squared", SQUARED)
def test_gated_matches_mirror(xp, squared, shape, dtype):
    x = cases.normal(shape, dtype, seed=6, scale=3.0)
    want = reference.relu(x, squared=squared, gated=True)
    out, buffer = cases.guarded(xp, want.shape, x.dtype)
    got = kernels.relu(xp.asarray(x), squared=squared, gated=True, out=out)
    assert got is out
    assert_close(got, want)
    assert_guards(buffer)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_gated_views_and_in_place(xp, dtype):
    rows = cases.normal((9, 48), dtype, seed=7)
    want = reference.relu(rows[:, 8:40], squared=True, gated=True)
    array = xp.asarray(rows)
    assert_close(kernels.relu(array[:, 8:40], squared=True, gated=True), want)
    gate = array[:, 8:24]
    assert kernels.relu(array[:, 8:40], squared=True, gated=True, out=gate) is gate
    assert_close(xp.ascontiguousarray(gate), want)


@pytest.mark.parametrize("squared", SQUARED)
def test_gated_mirror_is_the_formula(squared):
    x = cases.normal((5, 14), "float32", seed=8)
    want = np.maximum(x[:, :7].astype(np.float64), 0) ** (1 + squared) * x[:, 7:]
    got = reference.relu(x, squared=squared, gated=True)
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_views_and_in_place(xp, dtype):
    x = cases.normal((64, 32), dtype, seed=2)
    want = reference.relu(x)
    assert_close(kernels.relu(misaligned(xp, x)), want)
    assert_close(kernels.relu(xp.asarray(np.ascontiguousarray(x.T)).T), want)
    array = xp.array(x)
    assert kernels.relu(array, out=array) is array
    assert_close(array, want)


@pytest.mark.parametrize("squared", SQUARED)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_extremes(xp, dtype, squared):
    x = extremes(dtype)
    got = kernels.relu(xp.asarray(x), squared=squared)
    assert_close(got, reference.relu(x, squared=squared))


@pytest.mark.parametrize("squared", SQUARED)
def test_mirror_is_the_formula(squared):
    x = cases.normal((500,), "float32", seed=3)
    want = [max(v, 0.0) ** (1 + squared) for v in x.tolist()]
    np.testing.assert_array_equal(reference.relu(x, squared=squared), np.array(want, np.float32))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_square_is_rounded_once(xp, dtype):
    x = cases.normal((500,), dtype, seed=5)
    want = np.square(np.maximum(x.astype(np.float32), 0)).astype(x.dtype)
    np.testing.assert_array_equal(to_numpy(kernels.relu(xp.asarray(x), squared=True)), want)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_twice_is_once(xp, dtype):
    once = kernels.relu(xp.asarray(cases.normal((301,), dtype, seed=4)))
    np.testing.assert_array_equal(to_numpy(kernels.relu(once)), to_numpy(once))


def test_contract(xp):
    x = xp.zeros((2, 8), np.float32)
    with pytest.raises(DTypeError, match=r"x: must be float32 or .*; got int32"):
        kernels.relu(x.astype(np.int32))
    with pytest.raises(DTypeError, match="x: must be an array; got float"):
        kernels.relu(1.0)
    with pytest.raises(ShapeError, match=r"out: must have shape \(2, 8\); got \(2, 4\)"):
        kernels.relu(x, out=x[:, :4])
    with pytest.raises(ContractError, match="x: must be of even length along its last axis"):
        kernels.relu(x[:, :7], gated=True)
