"""sigmoid_gate: the kernel against its mirror, the mirror against `math`, views, the contract."""

from __future__ import annotations

import math

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import ContractError, DTypeError, ShapeError
from engine.testing import cases
from engine.testing.cases_elementwise import assert_guards, extremes
from engine.testing.tolerances import assert_close

# (rows, F), including more rows than grid.y allows.
_CASES = (*cases.ROWS, (70000, 3))


def _inputs(shape, dtype):
    return cases.normal(shape, dtype, seed=1), cases.normal(shape, dtype, seed=2, scale=3.0)


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid(("rows", "f"), _CASES)
def test_matches_mirror(xp, rows, f, dtype):
    x, gate = _inputs((rows, f), dtype)
    out, buffer = cases.guarded(xp, (rows, f), x.dtype)
    got = kernels.sigmoid_gate(*cases.to_module(xp, x, gate), out=out)
    assert got is out
    assert_close(got, reference.sigmoid_gate(x, gate))
    assert_guards(buffer)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize(("f", "first"), [(64, 160), (64, 161), (20, 160)])
def test_a_gate_that_is_part_of_wider_rows(xp, f, first, dtype):
    """As in attention: the gate is behind q, k and v."""
    x, _ = _inputs((6, f), dtype)
    wide = cases.normal((6, 256), dtype, seed=3, scale=3.0)
    gate = wide[:, first : first + f]
    want = reference.sigmoid_gate(x, gate)
    array = xp.array(x)
    fused = xp.asarray(wide)
    assert kernels.sigmoid_gate(array, fused[:, first : first + f], out=array) is array
    assert_close(array, want)
    np.testing.assert_array_equal(to_numpy(fused), wide)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize(("rows", "heads", "head_dim"), [(5, 4, 128), (1, 3, 24), (70000, 2, 7)])
def test_a_gate_per_head(xp, rows, heads, head_dim, dtype):
    """The gates are columns of wider rows, which no vector is aligned to."""
    x, _ = _inputs((rows, heads * head_dim), dtype)
    wide = cases.normal((rows, heads + 3), dtype, seed=3, scale=3.0)
    want = reference.sigmoid_gate(x, np.repeat(wide[:, 1 : heads + 1], head_dim, axis=1))
    np.testing.assert_array_equal(reference.sigmoid_gate(x, wide[:, 1 : heads + 1]), want)
    array = xp.array(x)
    got = kernels.sigmoid_gate(array, xp.asarray(wide)[:, 1 : heads + 1], out=array)
    assert got is array
    assert_close(got, want)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_over_the_gate(xp, dtype):
    x, gate = _inputs((5, 128), dtype)
    array = xp.array(gate)
    kernels.sigmoid_gate(xp.asarray(x), array, out=array)
    assert_close(array, reference.sigmoid_gate(x, gate))


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_extremes(xp, dtype):
    gate = extremes(dtype)[None]
    x = np.full_like(gate, 0.75)
    got = kernels.sigmoid_gate(*cases.to_module(xp, x, gate))
    assert_close(got, reference.sigmoid_gate(x, gate))


def test_mirror_is_the_formula():
    x, gate = _inputs((3, 100), "float32")
    pairs = zip(x.ravel().tolist(), gate.ravel().tolist(), strict=True)
    want = np.reshape([a / (1 + math.exp(-g)) for a, g in pairs], x.shape)
    np.testing.assert_allclose(reference.sigmoid_gate(x, gate), want, rtol=1e-6)


def test_contract(xp):
    x = xp.zeros((2, 8), np.float32)
    with pytest.raises(ContractError, match="gate: must be of a divisor of x's 8 features; got 3"):
        kernels.sigmoid_gate(x, x[:, :3])
    with pytest.raises(DTypeError, match="gate: must be float32; got float16"):
        kernels.sigmoid_gate(x, x.astype(np.float16))
    with pytest.raises(ShapeError, match=r"x: must have shape \(T, F\); got \(8,\)"):
        kernels.sigmoid_gate(x[0], x)
