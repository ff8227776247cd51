"""residual_add: the kernel against its mirror, the mirror against float64, and the contract."""

from __future__ import annotations

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import DTypeError, ShapeError
from engine.testing import cases
from engine.testing.cases_elementwise import FLAT_SHAPES, assert_guards, misaligned
from engine.testing.tolerances import assert_close


def _inputs(shape, dtype):
    return cases.normal(shape, dtype, seed=1), cases.normal(shape, dtype, seed=2, scale=3.0)


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("shape", FLAT_SHAPES)
def test_matches_mirror(xp, shape, dtype):
    x, residual = _inputs(shape, dtype)
    out, buffer = cases.guarded(xp, shape, x.dtype)
    got = kernels.residual_add(*cases.to_module(xp, x, residual), out=out)
    assert got is out
    assert_close(got, reference.residual_add(x, residual))
    assert_close(kernels.residual_add(*cases.to_module(xp, x, residual)), to_numpy(got))
    assert_guards(buffer)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("into", [0, 1])
def test_in_place(xp, into, dtype):
    x, residual = _inputs((5, 577), dtype)
    want = reference.residual_add(x, residual)
    arrays = cases.to_module(xp, x.copy(), residual.copy())
    assert kernels.residual_add(*arrays, out=arrays[into]) is arrays[into]
    assert_close(arrays[into], want)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_misaligned_and_transposed_views(xp, dtype):
    x, residual = _inputs((64, 32), dtype)
    want = reference.residual_add(x, residual)
    assert_close(kernels.residual_add(misaligned(xp, x), xp.asarray(residual)), want)
    transposed = xp.asarray(np.ascontiguousarray(x.T)).T
    assert_close(kernels.residual_add(transposed, xp.asarray(residual)), want)


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("shape", [(5, 577), (3, 64)])
def test_scaled(xp, shape, dtype):
    x, residual = _inputs(shape, dtype)
    scale = np.array([0.375], x.dtype)
    want = (x.astype(np.float32) + residual.astype(np.float32)) * np.float32(0.375)
    arrays = cases.to_module(xp, x, residual.copy(), scale)
    got = kernels.residual_add(*arrays[:2], scale=arrays[2], out=arrays[1])
    assert got is arrays[1]
    assert_close(got, want.astype(x.dtype))


def test_mirror_is_the_sum():
    x, residual = _inputs((6, 50), "float32")
    want = x.astype(np.float64) + residual.astype(np.float64)
    np.testing.assert_allclose(reference.residual_add(x, residual), want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_order_does_not_matter(xp, dtype):
    x, residual = cases.to_module(xp, *_inputs((3, 100), dtype))
    a, b = kernels.residual_add(x, residual), kernels.residual_add(residual, x)
    np.testing.assert_array_equal(to_numpy(a), to_numpy(b))


def test_contract(xp):
    x = xp.zeros((2, 8), np.float32)
    with pytest.raises(ShapeError, match=r"residual: must have shape \(2, 8\); got \(8,\)"):
        kernels.residual_add(x, x[0])
    with pytest.raises(DTypeError, match="residual: must be float32; got float16"):
        kernels.residual_add(x, x.astype(np.float16))
    with pytest.raises(DTypeError, match="x: must be float32 or float16 or bfloat16; got int64"):
        kernels.residual_add(x.astype(np.int64), x)
    if xp is not np:
        with pytest.raises(ShapeError, match="out: must be C-contiguous"):
            kernels.residual_add(x, x, out=xp.zeros((8, 2), np.float32).T)
