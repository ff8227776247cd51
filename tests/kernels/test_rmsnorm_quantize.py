"""rmsnorm_quantize: bitwise equal to rmsnorm followed by quantize_rows."""

from __future__ import annotations

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import ContractError, ShapeError
from engine.testing import cases

ROWS = (*cases.ROWS, (3, 14336), (2, 20000))


def assert_same(got, want):
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        np.testing.assert_array_equal(to_numpy(a), to_numpy(b))


@pytest.mark.grid("group", [0, 128])
@pytest.mark.grid("codes", ["fp8", "int8"])
@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid(("rows", "n"), ROWS)
def test_is_the_two_ops(xp, rows, n, dtype, codes, group):
    x = xp.asarray(cases.normal((rows, n), dtype, seed=1, scale=3.0))
    weight = xp.asarray(cases.normal((n,), dtype, seed=2, mean=1.0))
    residual = xp.asarray(cases.normal((rows, n), dtype, seed=3))
    numbers = {"eps": 1e-5, "weight_offset": 0.5}
    wanted = {"dtype": codes, "group": group}
    y = kernels.rmsnorm(x, weight, **numbers)
    got = kernels.rmsnorm_quantize(x, weight, **numbers, **wanted)
    assert_same(got, kernels.quantize_rows(y, **wanted))
    out = xp.full_like(x, np.nan)
    assert_same(kernels.rmsnorm_quantize(x, weight, **numbers, **wanted, normed_out=out), got)
    np.testing.assert_array_equal(to_numpy(out), to_numpy(y))
    added = {"residual": residual, "x_scale": 0.75, **numbers}
    y, h = kernels.rmsnorm(x, weight, **added)
    got = kernels.rmsnorm_quantize(x, weight, **added, **wanted, normed_out=out)
    assert_same(got, (*kernels.quantize_rows(y, **wanted), h))
    np.testing.assert_array_equal(to_numpy(out), to_numpy(y))


@pytest.mark.parametrize("start", [8, 3])
def test_a_view_and_in_place(xp, start):
    wide = xp.asarray(cases.normal((5, 320), "bfloat16", seed=4))
    x = wide[:, start : start + 256]
    weight = xp.asarray(cases.normal((256,), "bfloat16", seed=5, mean=1.0))
    residual = xp.asarray(cases.normal((5, 256), "bfloat16", seed=6))
    normed = xp.empty((5, 256), x.dtype)
    want = kernels.rmsnorm_quantize(x.copy(), weight, residual=residual, normed_out=normed)
    given = x.copy()
    outs = {"normed_out": given, "residual_out": residual.copy()}
    kernels.rmsnorm_quantize(given, weight, residual=residual, **outs)
    np.testing.assert_array_equal(to_numpy(given), to_numpy(normed))
    got = kernels.rmsnorm_quantize(x, weight, residual=residual, residual_out=residual)
    assert got[2] is residual
    np.testing.assert_array_equal(to_numpy(got[2]), to_numpy(want[2]))
    steps = np.abs(to_numpy(got[0]).astype(int) - to_numpy(want[0]).astype(int))
    assert steps.max() <= 1 and (steps != 0).mean() <= 0.002


@pytest.mark.parametrize("codes", ["fp8", "int8"])
def test_is_close_to_the_mirror(xp, codes):
    """The norm's last bit may move a code by one step."""
    x = cases.normal((9, 1024), "float32", seed=7, scale=3.0)
    weight = cases.normal((1024,), "float32", seed=8, mean=1.0)
    got = kernels.rmsnorm_quantize(xp.asarray(x), xp.asarray(weight), dtype=codes)
    want = reference.rmsnorm_quantize(x, weight, dtype=codes)
    steps = np.abs(to_numpy(got[0]).astype(int) - want[0].astype(int))
    assert steps.max() <= 1 and (steps != 0).mean() <= 0.002
    np.testing.assert_allclose(to_numpy(got[1]), want[1], rtol=1e-5)


def test_contract(xp):
    x, weight = xp.ones((2, 8), np.float32), xp.ones(8, np.float32)
    with pytest.raises(ShapeError, match="weight: must have shape"):
        kernels.rmsnorm_quantize(x, weight[:7])
    with pytest.raises(ContractError, match="x_scale: must be 1 without residual"):
        kernels.rmsnorm_quantize(x, weight, x_scale=2.0)
    with pytest.raises(ContractError, match="group: must be 0 or 128"):
        kernels.rmsnorm_quantize(x, weight, group=1)
