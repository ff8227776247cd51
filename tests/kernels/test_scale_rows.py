"""scale_rows: the kernel against its mirror, in place, and the contract."""

from __future__ import annotations

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import ContractError, DTypeError, ShapeError
from engine.testing import cases
from engine.testing.cases_elementwise import assert_guards
from engine.testing.tolerances import assert_close


@pytest.mark.grid("is_common", [False, True])
@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid(("rows", "n"), (*cases.ROWS, (20000, 8)))
def test_matches_mirror(xp, rows, n, dtype, is_common):
    x = cases.normal((rows, n), dtype, seed=1)
    factors = cases.normal((1 if is_common else rows,), "float32", seed=2)
    want = reference.scale_rows(x, factors)
    gx, gf = cases.to_module(xp, x, factors)
    out, buffer = cases.guarded(xp, (rows, n), x.dtype)
    assert kernels.scale_rows(gx, gf, out=out) is out
    assert_close(out, want)
    assert_guards(buffer)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_in_place_on_strided_rows(xp, dtype):
    wide = cases.normal((5, 40), dtype, seed=3)
    factors = np.array([1.0, 2.0, 0.0, -1.0, 1.0], np.float32)
    array, gf = cases.to_module(xp, wide.copy(), factors)
    view = array[:, 8:24]
    kernels.scale_rows(view, gf, out=view)
    want = wide.copy()
    want[:, 8:24] = reference.scale_rows(wide[:, 8:24], factors)
    np.testing.assert_array_equal(to_numpy(array).view("u1"), want.view("u1"))


@pytest.mark.parametrize(
    ("of_x", "of_out"),
    [(np.s_[:, :5], np.s_[:, 5:10]), (np.s_[::2, :8], np.s_[1::2, :8])],
    ids=["columns", "rows"],
)
def test_x_and_out_may_lie_between_each_other(xp, of_x, of_out):
    host = cases.normal((6, 10), "float32", seed=5)
    both, factors = xp.array(host), np.array([2.0], np.float32)
    kernels.scale_rows(both[of_x], xp.asarray(factors), out=both[of_out])
    host[of_out] = 2 * host[of_x]
    np.testing.assert_array_equal(to_numpy(both), host)


def test_the_factor_1_copies_unless_in_place(xp):
    x = cases.normal((3, 16), "float16", seed=4)
    gx, one = cases.to_module(xp, x, np.ones(1, np.float32))
    for out in (None, gx):
        got = kernels.scale_rows(gx, one, out=out)
        np.testing.assert_array_equal(to_numpy(got), x)


def test_mirror_is_the_formula():
    x, factors = np.array([[1.0, -2.0], [3.0, 0.5]]), np.array([3.0, -1.0])
    np.testing.assert_array_equal(reference.scale_rows(x, factors), [[3.0, -6.0], [-3.0, -0.5]])
    np.testing.assert_array_equal(reference.scale_rows(x, factors[:1]), 3 * x)


def test_contract(xp):
    x, factors = xp.ones((2, 8), np.float32), xp.ones(2, np.float32)
    with pytest.raises(
        ShapeError, match=r"factors: must have shape \(M,\); M = 2 from x; got \(3,"
    ):
        kernels.scale_rows(x, xp.ones(3, np.float32))
    with pytest.raises(DTypeError, match="factors: must be float32; got float16"):
        kernels.scale_rows(x, factors.astype(np.float16))
    with pytest.raises(ContractError, match="out: must be x, or apart from it"):
        kernels.scale_rows(x[:1], factors[:1], out=x.reshape(-1)[4:12].reshape(1, 8))
    with pytest.raises(ShapeError, match="out: must have shape"):
        kernels.scale_rows(x, factors, out=xp.ones((2, 7), np.float32))
