"""swiglu_quantize: bitwise equal to swiglu followed by quantize_rows."""

from __future__ import annotations

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import ContractError
from engine.testing import cases

ROWS = (*cases.ROWS, (3, 14336), (2, 20000), (3, 0))


@pytest.mark.grid("group", [0, 128])
@pytest.mark.grid("codes", ["fp8", "int8"])
@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid(("rows", "n"), ROWS)
def test_is_the_two_ops(xp, rows, n, dtype, codes, group):
    x = xp.asarray(cases.normal((rows, 2 * n), dtype, seed=1, scale=3.0))
    got = kernels.swiglu_quantize(x, dtype=codes, group=group)
    want = kernels.quantize_rows(kernels.swiglu(x), dtype=codes, group=group)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        np.testing.assert_array_equal(to_numpy(a), to_numpy(b))


@pytest.mark.parametrize("codes", ["fp8", "int8"])
@pytest.mark.parametrize("start", [8, 3])
def test_a_view(xp, start, codes):
    wide = xp.asarray(cases.normal((5, 320), "bfloat16", seed=2))
    got = kernels.swiglu_quantize(wide[:, start : start + 256], dtype=codes)
    want = kernels.swiglu_quantize(wide[:, start : start + 256].copy(), dtype=codes)
    np.testing.assert_array_equal(to_numpy(got[0]), to_numpy(want[0]))


@pytest.mark.parametrize("codes", ["fp8", "int8"])
def test_is_close_to_the_mirror(xp, codes):
    """The activation's last bit may move a code by one step."""
    x = cases.normal((9, 1024), "float32", seed=3, scale=3.0)
    got = kernels.swiglu_quantize(xp.asarray(x), dtype=codes)
    want = reference.swiglu_quantize(x, dtype=codes)
    steps = np.abs(to_numpy(got[0]).astype(int) - want[0].astype(int))
    assert steps.max() <= 1 and (steps != 0).mean() <= 0.002
    np.testing.assert_allclose(to_numpy(got[1]), want[1], rtol=1e-5)


def test_contract(xp):
    with pytest.raises(ContractError, match="x: must be of even length along its last axis"):
        kernels.swiglu_quantize(xp.ones((2, 7), np.float32))
    with pytest.raises(ContractError, match="dtype: must be 'fp8' or 'int8'"):
        kernels.swiglu_quantize(xp.ones((2, 8), np.float32), dtype="e4m3")
