"""geglu: the kernel against its mirror, the mirror against `math`, views, and the contract."""

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

_APPROXIMATE = ("tanh", "none")
# (rows, F), including more rows than grid.y allows.
_CASES = (*cases.ROWS, (70000, 3))


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("approximate", _APPROXIMATE)
@pytest.mark.grid(("rows", "f"), _CASES)
def test_matches_mirror(xp, rows, f, approximate, dtype):
    x = cases.normal((rows, 2 * f), dtype, seed=1, scale=3.0)
    out, buffer = cases.guarded(xp, (rows, f), x.dtype)
    got = kernels.geglu(xp.asarray(x), approximate=approximate, out=out)
    assert got is out
    assert_close(got, reference.geglu(x, approximate=approximate))
    assert_guards(buffer)


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("approximate", _APPROXIMATE)
@pytest.mark.grid("f", [64, 20])
def test_strided_rows_in_and_out(xp, f, approximate, dtype):
    wide = cases.normal((6, 2 * f + 32), dtype, seed=2)
    want = reference.geglu(wide[:, 16 : 16 + 2 * f], approximate=approximate)
    into = xp.asarray(np.full((6, f + 16), np.nan, wide.dtype))
    kernels.geglu(
        xp.asarray(wide)[:, 16 : 16 + 2 * f], approximate=approximate, out=into[:, 8 : 8 + f]
    )
    assert_close(xp.ascontiguousarray(into[:, 8 : 8 + f]), want)
    host = to_numpy(into)
    assert np.isnan(host[:, :8]).all() and np.isnan(host[:, 8 + f :]).all()


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("f", [64, 20])
def test_gate_and_up_in_two_arrays(xp, f, dtype):
    """A per-layer input is a slice of wider rows."""
    gate, wide = cases.normal((6, f), dtype, seed=4), cases.normal((6, 3 * f), dtype, seed=5)
    up = wide[:, f : 2 * f]
    want = reference.geglu(np.concatenate([gate, up], axis=1))
    gates, wides = cases.to_module(xp, gate, wide)
    got = kernels.geglu(gates, up=wides[:, f : 2 * f], out=gates)
    assert got is gates
    assert_close(got, want)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("f", [128, 33])
def test_over_the_gate_half(xp, f, dtype):
    x = cases.normal((5, 2 * f), dtype, seed=3)
    array = xp.array(x)
    kernels.geglu(array, out=array[:, :f])
    assert_close(xp.ascontiguousarray(array[:, :f]), reference.geglu(x))
    np.testing.assert_array_equal(to_numpy(array)[:, f:], x[:, f:])


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("shape", [(48,), (2, 3, 40), (2, 0, 40), (2, 1, 3, 6)])
def test_any_leading_axes(xp, shape, dtype):
    x = cases.normal(shape, dtype, seed=4)
    assert_close(kernels.geglu(xp.asarray(x)), reference.geglu(x))
    assert_close(kernels.geglu(misaligned(xp, x)), reference.geglu(x))


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("approximate", _APPROXIMATE)
def test_extremes(xp, approximate, dtype):
    gate = extremes(dtype)
    x = np.concatenate([gate, np.full_like(gate, 0.75)])
    assert_close(
        kernels.geglu(xp.asarray(x), approximate=approximate),
        reference.geglu(x, approximate=approximate),
    )


def test_mirror_is_the_formula():
    x = cases.normal((3, 200), "float32", seed=5, scale=3.0)
    gate, up = x[:, :100].astype(np.float64), x[:, 100:].astype(np.float64)
    erf = np.vectorize(math.erf)(gate * math.sqrt(0.5))
    tanh = np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))
    for approximate, s in {"none": erf, "tanh": tanh}.items():
        want = gate * (1 + s) / 2 * up
        got = reference.geglu(x, approximate=approximate)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_linear_in_the_upper_half(xp):
    x = cases.normal((4, 256), "float32", seed=6)
    twice = x.copy()
    twice[:, 128:] *= 2
    a, b = (kernels.geglu(xp.asarray(v)) for v in (x, twice))
    np.testing.assert_array_equal(2 * to_numpy(a), to_numpy(b))


def test_contract(xp):
    x = xp.zeros((2, 8), np.float32)
    with pytest.raises(ContractError, match="x: must be of even length along its last axis"):
        kernels.geglu(x[:, :7])
    with pytest.raises(DTypeError, match=r"x: must be float32 or .*; got int32"):
        kernels.geglu(x.astype(np.int32))
    with pytest.raises(ShapeError, match=r"x: must have shape \(..., 2F\); got \(\)"):
        kernels.geglu(xp.zeros((), np.float32))
    with pytest.raises(ShapeError, match="out: must have shape"):
        kernels.geglu(x, out=x)
    with pytest.raises(ContractError, match="approximate: must be 'tanh' or 'none'; got 'erf'"):
        kernels.geglu(x, approximate="erf")
