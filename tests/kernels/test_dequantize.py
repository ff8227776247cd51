"""dequantize: the kernel gives the mirror's bits, in every format."""

from __future__ import annotations

import numpy as np
import pytest

from engine import kernels, reference
from engine.device import to_numpy
from engine.errors import ContractError, DTypeError, ShapeError
from engine.testing import cases
from engine.testing.cases_quantized import BYTE_FORMATS, PACKED_FORMATS, random_weight, weight_to
from engine.testing.tolerances import assert_close
from engine.weights import Weight


def _same(got, want):
    got = to_numpy(got)
    assert got.dtype == want.dtype and got.shape == want.shape
    np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))


@pytest.mark.grid("dtype", cases.DTYPES)
@pytest.mark.grid(("n", "k"), [(16, 64), (37, 200), (1, 1), (70, 512), (0, 64)])
@pytest.mark.grid("name", [*PACKED_FORMATS, *BYTE_FORMATS])
def test_has_the_mirrors_bits(xp, name, n, k, dtype):
    weight = random_weight(name, n, k)
    out, buffer = cases.guarded(xp, (n, k), cases.normal((1,), dtype, 0).dtype)
    got = kernels.dequantize(weight_to(xp, weight), dtype, out=out)
    assert got is out
    _same(got, reference.dequantize(weight, dtype))
    assert bool(xp.isnan(buffer[:64]).all()) and bool(xp.isnan(buffer[-64:]).all())


@pytest.mark.parametrize("scales", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["int4_g128", "int4_g32_zp", "int8_g64"])
def test_scales_of_checkpoints(xp, name, scales):
    weight = random_weight(name, 48, 320, scales=scales)
    got = kernels.dequantize(weight_to(xp, weight), "bfloat16")
    _same(got, reference.dequantize(weight, "bfloat16"))


@pytest.mark.parametrize("name", ["int4_g128", "q6_k", "int8_g32_zp"])
def test_columns_are_in_their_logical_order(xp, name):
    weight = random_weight(name, 40, 256, permuted=True)
    got = kernels.dequantize(weight_to(xp, weight), "float16")
    _same(got, reference.dequantize(weight, "float16"))


def test_mirror_is_the_formula():
    weight = random_weight("int4_g32_zp", 16, 64)
    rows = weight.scales.reshape(1, 2, 8, 2, 2).transpose(0, 3, 2, 1, 4).reshape(16, 2, 2)
    low = kernels.dequantize(weight, "float32").astype(np.float64)
    steps = low / np.repeat(rows[..., 0].astype(np.float64), 32, axis=1)
    codes = steps + np.repeat(rows[..., 1].astype(np.float64), 32, axis=1)
    np.testing.assert_allclose(codes, np.rint(codes), atol=1e-4)
    assert codes.min() > -0.01 and codes.max() < 15.01
    assert_close(low.astype(np.float32), reference.dequantize(weight, "float32"))


def test_contract():
    weight = random_weight("q4_0", 16, 64)
    with pytest.raises(ContractError, match="dtype: must be one of"):
        kernels.dequantize(weight, "int8")
    with pytest.raises(DTypeError, match="weight: must be a Weight; got ndarray"):
        kernels.dequantize(np.zeros((16, 64), np.float32), "float32")
    with pytest.raises(ContractError, match="a format that is not dense; got 'float32'"):
        kernels.dequantize(Weight.dense(np.zeros((16, 64), np.float32)), "float32")
    with pytest.raises(ShapeError, match="out: must have shape"):
        kernels.dequantize(weight, "float32", out=np.zeros((16, 63), np.float32))
