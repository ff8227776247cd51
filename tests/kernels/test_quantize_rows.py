"""quantize_rows: the kernel against its mirror, bit for bit, and the mirror's error bounds."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import ContractError, DTypeError, ShapeError
from engine.testing import cases

CODES = ("fp8", "int8")
ROWS = (*cases.ROWS, (2, 12288), (3, 14336), (2, 20000), (3, 0))


def values(codes):
    return codes if codes.dtype == np.int8 else codes.view(ml_dtypes.float8_e4m3fn)


def assert_same(got, want):
    for a, b in zip(got, want, strict=True):
        host = to_numpy(a)
        assert host.dtype == b.dtype and host.shape == b.shape
        np.testing.assert_array_equal(host, b)


@pytest.mark.grid("group", [0, 128])
@pytest.mark.grid("codes", CODES)
@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid(("rows", "n"), ROWS)
def test_matches_mirror(xp, rows, n, dtype, codes, group):
    x = cases.normal((rows, n), dtype, seed=1, scale=3.0)
    got = kernels.quantize_rows(xp.asarray(x), dtype=codes, group=group)
    assert_same(got, reference.quantize_rows(x, dtype=codes, group=group))


@pytest.mark.grid("codes", CODES)
@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid("start", [8, 3])
def test_a_view(xp, start, dtype, codes):
    wide = cases.normal((5, 320), dtype, seed=2)
    got = kernels.quantize_rows(xp.asarray(wide)[:, start : start + 256], dtype=codes, group=128)
    want = reference.quantize_rows(wide[:, start : start + 256], dtype=codes, group=128)
    assert_same(got, want)


@pytest.mark.parametrize("codes", CODES)
def test_zeros_tiny_and_huge_numbers(xp, codes):
    x = np.ones((5, 64), np.float32)
    x[0] = 0
    x[1] = np.linspace(-3e-39, 3e-39, 64)
    x[2, 7] = np.inf
    x[3, 9] = np.nan
    x[4] *= 3e38
    got = kernels.quantize_rows(xp.asarray(x), dtype=codes)
    assert_same(got, reference.quantize_rows(x, dtype=codes))
    scales = to_numpy(got[1])[:, 0]
    assert scales[0] == 0 and not to_numpy(got[0])[0].any()
    assert np.isinf(scales[2]) and np.isnan(scales[3])


@pytest.mark.parametrize("group", [0, 128])
@pytest.mark.parametrize(("codes", "error"), [("fp8", 2**-4), ("int8", 1 / 254)])
def test_mirror_keeps_numbers(codes, error, group):
    x = cases.normal((7, 300), "float32", seed=3)
    got, scales = reference.quantize_rows(x, dtype=codes, group=group)
    spread = np.repeat(scales, group or 300, axis=1)[:, :300]
    back = values(got).astype(np.float64) * spread
    largest = 448 if codes == "fp8" else 127
    relative = np.abs(x) if codes == "fp8" else spread * largest
    assert (np.abs(back - x) <= error * relative + spread * 2**-9).all()
    assert np.abs(values(got).astype(np.float32)).max() == largest


def test_contract(xp):
    x = xp.ones((2, 8), np.float32)
    with pytest.raises(ContractError, match="dtype: must be 'fp8' or 'int8'; got 'int4'"):
        kernels.quantize_rows(x, dtype="int4")
    with pytest.raises(ContractError, match="group: must be 0 or 128; got 64"):
        kernels.quantize_rows(x, group=64)
    with pytest.raises(DTypeError, match="x: must be float32 or float16 or bfloat16"):
        kernels.quantize_rows(x.astype(np.int32))
    with pytest.raises(ShapeError, match=r"x: must have shape \(M, K\)"):
        kernels.quantize_rows(x[0])
