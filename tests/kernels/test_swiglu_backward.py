"""swiglu_backward: the kernel against its mirror, the mirror against finite differences, views."""

from __future__ import annotations

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


def _inputs(shape, dtype):
    """Return dout (..., F) and x (..., 2F) for x of `shape`."""
    dout = cases.normal((*shape[:-1], shape[-1] // 2), dtype, seed=1)
    return dout, cases.normal(shape, dtype, seed=2, scale=3.0)


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid(("rows", "f"), _CASES)
def test_matches_mirror(xp, rows, f, dtype):
    dout, x = _inputs((rows, 2 * f), dtype)
    out, buffer = cases.guarded(xp, x.shape, x.dtype)
    got = kernels.swiglu_backward(*cases.to_module(xp, dout, x), out=out)
    assert got is out
    assert_close(got, reference.swiglu_backward(dout, x), reduction=2)
    assert_guards(buffer)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("f", [64, 20])
def test_strided_rows_in_and_out(xp, f, dtype):
    wide = cases.normal((6, 2 * f + 32), dtype, seed=3)
    upstream = cases.normal((6, f + 16), dtype, seed=4)
    want = reference.swiglu_backward(upstream[:, 8 : 8 + f], wide[:, 16 : 16 + 2 * f])
    into = xp.asarray(np.full((6, 2 * f + 16), np.nan, wide.dtype))
    gup, gwide = cases.to_module(xp, upstream, wide)
    view = into[:, 8 : 8 + 2 * f]
    kernels.swiglu_backward(gup[:, 8 : 8 + f], gwide[:, 16 : 16 + 2 * f], out=view)
    assert_close(xp.ascontiguousarray(view), want, reduction=2)
    host = to_numpy(into)
    assert np.isnan(host[:, :8]).all() and np.isnan(host[:, 8 + 2 * f :]).all()


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("f", [128, 33])
def test_in_place(xp, f, dtype):
    dout, x = _inputs((300, 2 * f), dtype)
    array = xp.array(x)
    assert kernels.swiglu_backward(xp.asarray(dout), array, out=array) is array
    assert_close(array, reference.swiglu_backward(dout, x), reduction=2)


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("shape", [(48,), (2, 3, 40), (2, 0, 40), (2, 1, 3, 6)])
def test_any_leading_axes(xp, shape, dtype):
    dout, x = _inputs(shape, dtype)
    want = reference.swiglu_backward(dout, x)
    gdout, gx = cases.to_module(xp, dout, x)
    assert_close(kernels.swiglu_backward(gdout, gx), want, reduction=2)
    assert_close(kernels.swiglu_backward(gdout, misaligned(xp, x)), want, reduction=2)
    assert_close(kernels.swiglu_backward(misaligned(xp, dout), gx), want, reduction=2)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_extremes(xp, dtype):
    gate = extremes(dtype)
    x = np.concatenate([gate, np.full_like(gate, 0.75)])
    dout = np.ones_like(gate)
    got = kernels.swiglu_backward(*cases.to_module(xp, dout, x))
    assert_close(got, reference.swiglu_backward(dout, x), reduction=2)
    finite = np.isfinite(gate.astype(np.float32))
    assert np.isfinite(to_numpy(got).astype(np.float32).reshape(2, -1)[:, finite]).all()


def test_mirror_is_the_derivative():
    """Central differences in float64, for gates in both tails and between."""
    rng = np.random.default_rng(5)
    x = np.concatenate([np.linspace(-12, 12, 97), rng.standard_normal(97)])
    dout = rng.standard_normal(97)
    forward = kernels.swiglu
    found = np.empty_like(x)
    for i in range(x.size):
        step = np.zeros_like(x)
        step[i] = 1e-5
        ends = [np.sum(dout * forward(x + s * step)) for s in (1, -1)]
        found[i] = (ends[0] - ends[1]) / 2e-5
    got = kernels.swiglu_backward(dout, x)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, found, rtol=1e-6, atol=1e-8)


def test_linear_in_dout(xp):
    dout, x = _inputs((4, 256), "float32")
    gdout, gx = cases.to_module(xp, dout, x)
    a, b = (to_numpy(kernels.swiglu_backward(d, gx)) for d in (gdout, 2 * gdout))
    np.testing.assert_array_equal(2 * a, b)


def test_contract(xp):
    x = xp.zeros((2, 8), np.float32)
    dout = xp.zeros((2, 4), np.float32)
    with pytest.raises(ContractError, match="x: must be of even length along its last axis"):
        kernels.swiglu_backward(dout, x[:, :7])
    with pytest.raises(DTypeError, match=r"x: must be float32 or .*; got int32"):
        kernels.swiglu_backward(dout, x.astype(np.int32))
    with pytest.raises(ShapeError, match=r"dout: must have shape \(2, 4\); got \(2, 8\)"):
        kernels.swiglu_backward(x, x)
    with pytest.raises(DTypeError, match="dout: must be float32; got float16"):
        kernels.swiglu_backward(dout.astype(np.float16), x)
    with pytest.raises(ShapeError, match="out: must have shape"):
        kernels.swiglu_backward(dout, x, out=dout)
