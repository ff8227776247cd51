"""swiglu: the kernel against its mirror, the mirror against `math`, views, and the contract."""

from __future__ import annotations

import math

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import ContractError, DTypeError, ShapeError
from engine.testing import cases
from engine.testing.cases_elementwise import assert_guards, extremes, misaligned
from engine.testing.tolerances import assert_close

# (rows, F), including more rows than grid.y allows.
_CASES = (*cases.ROWS, (70000, 3))


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid(("rows", "f"), _CASES)
def test_matches_mirror(xp, rows, f, dtype):
    x = cases.normal((rows, 2 * f), dtype, seed=1, scale=3.0)
    out, buffer = cases.guarded(xp, (rows, f), x.dtype)
    got = kernels.swiglu(xp.asarray(x), out=out)
    assert got is out
    assert_close(got, reference.swiglu(x))
    assert_guards(buffer)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("f", [64, 20])
def test_strided_rows_in_and_out(xp, f, dtype):
    wide = cases.normal((6, 2 * f + 32), dtype, seed=2)
    want = reference.swiglu(wide[:, 16 : 16 + 2 * f])
    into = xp.asarray(np.full((6, f + 16), np.nan, wide.dtype))
    kernels.swiglu(xp.asarray(wide)[:, 16 : 16 + 2 * f], out=into[:, 8 : 8 + f])
    assert_close(xp.ascontiguousarray(into[:, 8 : 8 + f]), want)
    host = to_numpy(into)
    assert np.isnan(host[:, :8]).all() and np.isnan(host[:, 8 + f :]).all()


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("f", [64, 20])
def test_rows_apart(xp, f, dtype):
    wide = cases.normal((6, 2 * f + 32), dtype, seed=2)
    up = cases.normal((6, f), dtype, seed=5)
    want = reference.swiglu(np.concatenate([wide[:, 16 : 16 + f], up], axis=1))
    assert_close(kernels.swiglu(xp.asarray(wide)[:, 16 : 16 + f], up=xp.asarray(up)), want)
    with pytest.raises(ShapeError, match="up"):
        kernels.swiglu(xp.asarray(wide), up=xp.asarray(up))


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("f", [128, 33])
def test_over_the_gate_half(xp, f, dtype):
    x = cases.normal((5, 2 * f), dtype, seed=3)
    array = xp.array(x)
    kernels.swiglu(array, out=array[:, :f])
    assert_close(xp.ascontiguousarray(array[:, :f]), reference.swiglu(x))
    np.testing.assert_array_equal(to_numpy(array)[:, f:], x[:, f:])


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("shape", [(48,), (2, 3, 40), (2, 0, 40), (2, 1, 3, 6)])
def test_any_leading_axes(xp, shape, dtype):
    x = cases.normal(shape, dtype, seed=4)
    assert_close(kernels.swiglu(xp.asarray(x)), reference.swiglu(x))
    assert_close(kernels.swiglu(misaligned(xp, x)), reference.swiglu(x))


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_extremes(xp, dtype):
    gate = extremes(dtype)
    x = np.concatenate([gate, np.full_like(gate, 0.75)])
    assert_close(kernels.swiglu(xp.asarray(x)), reference.swiglu(x))


def test_mirror_is_the_formula():
    x = cases.normal((3, 200), "float32", seed=5, scale=4.0)
    pairs = zip(x[:, :100].ravel().tolist(), x[:, 100:].ravel().tolist(), strict=True)
    want = np.reshape([g / (1 + math.exp(-g)) * u for g, u in pairs], (3, 100))
    np.testing.assert_allclose(reference.swiglu(x), want, rtol=1e-5, atol=1e-7)


def test_linear_in_the_upper_half(xp):
    x = cases.normal((4, 256), "float32", seed=6)
    twice = x.copy()
    twice[:, 128:] *= 2
    a, b = (kernels.swiglu(xp.asarray(v)) for v in (x, twice))
    np.testing.assert_array_equal(2 * to_numpy(a), to_numpy(b))


def test_contract(xp):
    x = xp.zeros((2, 8), np.float32)
    with pytest.raises(ContractError, match="x: must be of even length along its last axis"):
        kernels.swiglu(x[:, :7])
    with pytest.raises(DTypeError, match=r"x: must be float32 or .*; got int32"):
        kernels.swiglu(x.astype(np.int32))
    with pytest.raises(ShapeError, match=r"x: must have shape \(..., 2F\); got \(\)"):
        kernels.swiglu(xp.zeros((), np.float32))
    with pytest.raises(ShapeError, match="out: must have shape"):
        kernels.swiglu(x, out=x)
