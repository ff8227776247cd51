"""match_rms: the kernel against its mirror, the mirror against a loop, views, and the contract."""

from __future__ import annotations

import math

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import ShapeError
from engine.testing import cases
from engine.testing.cases_elementwise import assert_guards
from engine.testing.tolerances import assert_close


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("shape", [(1, 64), (5, 2048), (3, 33), (0, 8), (2, 1)])
def test_matches_mirror(xp, shape, dtype):
    x, target = (cases.normal(shape, dtype, seed, scale=seed) for seed in (1, 3))
    out, buffer = cases.guarded(xp, shape, x.dtype)
    got = kernels.match_rms(*cases.to_module(xp, x, target), out=out)
    assert got is out
    assert_close(got, reference.match_rms(x, target), reduction=shape[1])
    assert_guards(buffer)


@pytest.mark.parametrize("n", [64, 20])
def test_strided_rows(xp, n):
    x, target = (cases.normal((4, 3 * n), "bfloat16", seed) for seed in (1, 2))
    want = reference.match_rms(x[:, :n], target[:, n : 2 * n])
    gx, gtarget, into = cases.to_module(xp, x, target, np.zeros((4, 2 * n), x.dtype))
    kernels.match_rms(gx[:, :n], gtarget[:, n : 2 * n], out=into[:, n:])
    assert_close(xp.ascontiguousarray(into[:, n:]), want, reduction=n)
    assert not to_numpy(into[:, :n]).any()


def test_small_rows_have_a_bound(xp):
    x, target = xp.full((1, 4), 1e-4, np.float32), xp.ones((1, 4), np.float32)
    got = to_numpy(kernels.match_rms(x, target, least=1e-4))
    np.testing.assert_allclose(got, 1e-2, rtol=1e-5)


def test_nan_reaches_its_whole_row(xp):
    x, target = xp.ones((2, 300), np.float32), xp.ones((2, 300), np.float32)
    x[0, 7] = np.nan
    got = to_numpy(kernels.match_rms(x, target))
    assert np.isnan(got[0]).all() and (got[1] == 1).all()


def test_mirror_is_a_loop():
    x, target = (cases.normal((3, 10), "float32", seed) for seed in (1, 2))
    got = reference.match_rms(x, target)
    for row, other, result in zip(x.tolist(), target.tolist(), got, strict=True):
        ratio = math.sqrt(sum(v * v for v in other) / sum(v * v for v in row))
        np.testing.assert_allclose(result, [v * ratio for v in row], rtol=1e-5)


def test_contract(xp):
    x = xp.ones((2, 4), np.float32)
    with pytest.raises(ShapeError, match="target"):
        kernels.match_rms(x, x[:, :3])
