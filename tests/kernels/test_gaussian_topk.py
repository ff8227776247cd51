"""gaussian_topk: the kernel against its mirror, the mirror against statistics, views, contract."""

from __future__ import annotations

import statistics

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import ContractError, ShapeError
from engine.testing import cases
from engine.testing.cases_elementwise import assert_guards
from engine.testing.tolerances import assert_close


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("factor", [-0.5, 1.6448536])
@pytest.mark.grid("shape", [(1, 64), (5, 8192), (3, 33), (0, 8), (2, 1)])
def test_matches_mirror(xp, shape, factor, dtype):
    x = cases.normal(shape, dtype, seed=1, scale=2.0, mean=0.5)
    out, buffer = cases.guarded(xp, shape, x.dtype)
    got = kernels.gaussian_topk(xp.asarray(x), factor, out=out)
    assert got is out
    assert_close(got, reference.gaussian_topk(x, factor), reduction=shape[1])
    assert_guards(buffer)


@pytest.mark.parametrize("n", [64, 20])
def test_in_place_on_half_of_the_rows(xp, n):
    x = cases.normal((4, 2 * n), "bfloat16", seed=2)
    array = xp.asarray(x.copy())
    kernels.gaussian_topk(array[:, :n], 0.5, out=array[:, :n])
    want = reference.gaussian_topk(x[:, :n], 0.5)
    assert_close(xp.ascontiguousarray(array[:, :n]), want, reduction=n)
    np.testing.assert_array_equal(to_numpy(array)[:, n:], x[:, n:])


def test_mirror_is_the_formula_and_keeps_the_share():
    x = cases.normal((2, 5000), "float32", seed=3, mean=-1.0)
    got = reference.gaussian_topk(x, statistics.NormalDist().inv_cdf(0.95))
    for row, result in zip(x.astype(np.float64), got, strict=True):
        cutoff = statistics.fmean(row) + 1.6448536 * statistics.pstdev(row)
        np.testing.assert_allclose(result, np.maximum(row - cutoff, 0), atol=1e-5)
        assert abs((result > 0).mean() - 0.05) < 0.01


def test_contract(xp):
    with pytest.raises(ShapeError, match="x"):
        kernels.gaussian_topk(xp.ones(4, np.float32), 1.0)
    with pytest.raises(ContractError, match="factor"):
        kernels.gaussian_topk(xp.ones((1, 4), np.float32), float("nan"))
