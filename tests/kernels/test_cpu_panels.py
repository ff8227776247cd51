"""Products by weights in panels, the CPU's layout of quantized weights, against their mirrors."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from engine import kernels, reference, threads
from engine.errors import ContractError
from engine.kernels._cpu import compiled
from engine.kernels._cpu import panels as products
from engine.loading.quantized.rows import QuantizedRows
from engine.testing.tolerances import assert_close
from engine.weights import FORMATS, Weight, unpack_weight
from engine.weights.panels import panel_format

PACKED = [form for form in FORMATS.values() if form.is_packed]


@pytest.fixture(params=["C", "NumPy"])
def language(request, monkeypatch):
    """Compute with the C kernels, on several threads, or without a C compiler."""
    monkeypatch.setattr(threads, "count", lambda: 3)
    monkeypatch.setattr(products, "_MIN_SHARED", 0)
    if request.param == "NumPy":
        monkeypatch.setattr(compiled, "kernels", lambda: None)
    elif compiled.kernels() is None:
        pytest.skip(compiled.description())


def random_rows(form, shape, seed=0):
    """Return random codes and scales of a packed format."""
    rng = np.random.default_rng(seed)
    rows, columns = shape
    groups = columns // form.group
    low, high = form.code_range
    codes = rng.integers(low, high, shape, endpoint=True)
    codes = codes.astype(np.int8 if form.bits == 8 else np.uint8)
    parts = {}
    if form.code == "e2m1":
        scales = rng.integers(120, 130, (rows, groups)).astype(np.uint8)
    elif form.super_block:
        scales = rng.integers(1, 40, (rows, groups))
        scales = scales.astype(np.uint8 if form.offset else np.int8)
        supers = rng.random((rows, columns // form.super_block, *([2] if form.offset else [])))
        parts["super_scales"] = (supers / 100).astype(np.float16)
    else:
        scales = (rng.random((rows, groups)) / 10).astype(np.float16)
    if form.offset == "zero":
        parts["offsets"] = rng.integers(low, high, (rows, groups)).astype(codes.dtype)
    elif form.offset:
        kind = np.uint8 if form.super_block else np.float16
        parts["offsets"] = rng.integers(0, 20, (rows, groups)).astype(kind)
    return QuantizedRows(form, codes, scales, **parts)


@pytest.mark.parametrize("form", PACKED, ids=lambda form: form.name)
@pytest.mark.parametrize("min_bits", [4, 8])
def test_the_numbers_are_those_of_the_rows(form, min_bits):
    rows = random_rows(form, (40, 512))
    weight = rows.to_panels(min_bits)
    assert weight.format is form and weight.shape == (40, 512)
    np.testing.assert_allclose(unpack_weight(weight), rows.numbers(), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_weight_in_panels_is_dequantized(dtype):
    rows = random_rows(FORMATS["int4_g32_zp"], (40, 128))
    permutation = np.random.default_rng(3).permutation(128).astype(np.int32)
    weight = dataclasses.replace(rows, permutation=permutation).to_panels()
    out = np.empty((40, 128), dtype)
    assert kernels.dequantize(weight, dtype, out=out) is out
    np.testing.assert_array_equal(out, reference.dequantize(weight, dtype))


@pytest.mark.parametrize("shape", [(1, 32), (40, 512), (600, 1536), (1037, 576)])
@pytest.mark.parametrize("num_rows", [0, *range(1, 7), 10, 17, 40])
@pytest.mark.parametrize(("name", "min_bits"), [("q4_1", 4), ("q4_1", 8), ("q8_0", 8)])
def test_gemm_is_the_mirrors(language, shape, num_rows, name, min_bits):
    weight = random_rows(FORMATS[name], shape).to_panels(min_bits)
    rng = np.random.default_rng(1)
    x = rng.standard_normal((num_rows, shape[1]), dtype=np.float32)
    bias = rng.standard_normal(shape[0], dtype=np.float32)
    residual = rng.standard_normal((num_rows, shape[0]), dtype=np.float32)
    options = {"bias": bias, "residual": residual, "activation": "silu"}
    y = kernels.gemm_wna16(x, weight, **options)
    assert_close(y, reference.gemm_wna16(x, weight, **options), reduction=shape[1])
    assert y.flags.c_contiguous


@pytest.mark.parametrize("num_rows", [1, 16, 20])  # 16: as many as a group has columns
@pytest.mark.parametrize("activation", [None, "swiglu"])
def test_the_norm_before_it_is_the_mirrors(language, num_rows, activation):
    weight = random_rows(FORMATS["q6_k"], (960, 768)).to_panels()
    rng = np.random.default_rng(2)
    x = rng.standard_normal((num_rows, 768), dtype=np.float32)
    norm = rng.standard_normal(768, dtype=np.float32)
    options = {"eps": 1e-5, "weight_offset": 1.0, "activation": activation}
    options["bias"] = rng.standard_normal(960, dtype=np.float32)
    y = kernels.rmsnorm_gemm_wna16(x, norm, weight, **options)
    right = reference.rmsnorm_gemm_wna16(x, norm, weight, **options)
    assert_close(y, right, reduction=768)


def test_columns_may_be_permuted(language):
    rows = random_rows(FORMATS["int4_g32_zp"], (64, 128))
    permutation = np.random.default_rng(3).permutation(128).astype(np.int32)
    rows = dataclasses.replace(rows, permutation=permutation)
    x = np.random.default_rng(4).standard_normal((2, 128), dtype=np.float32)
    right = x.astype(np.float64) @ rows.numbers().T
    assert_close(kernels.gemm_wna16(x, rows.to_panels()), right.astype(np.float32), reduction=128)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_the_bits_do_not_depend_on_the_threads(monkeypatch, num_rows):
    monkeypatch.setattr(products, "_MIN_SHARED", 0)
    weight = random_rows(FORMATS["q4_1"], (3000, 576)).to_panels()
    x = np.random.default_rng(5).standard_normal((num_rows, 576), dtype=np.float32)
    results = []
    for count in (1, 2, 5):
        monkeypatch.setattr(threads, "count", lambda count=count: count)
        results.append(products.multiply(x, weight.panels))
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


@pytest.mark.parametrize("min_bits", [4, 8])
def test_the_size_is_known_in_advance(min_bits):
    """`panel_format` predicts the bytes, up to the padding to whole panels."""
    for form in PACKED:
        weight = random_rows(form, (64, 512)).to_panels(min_bits)
        assert panel_format(form, min_bits).num_bytes((64, 512)) == weight.num_bytes
    assert panel_format(FORMATS["float32"], min_bits) is FORMATS["float32"]


def test_rows_of_part_groups_are_no_panels():
    rows = QuantizedRows(FORMATS["int4_g64"], np.zeros((2, 96), np.uint8), np.ones((2, 2)))
    assert not rows.fits_panels


def test_panels_are_for_the_cpu_only():
    weight = random_rows(FORMATS["q4_0"], (16, 32)).to_panels()
    with pytest.raises(ContractError, match="a packed format"):
        kernels.gemm_wna16(np.zeros((1, 32), np.float32), Weight.dense(unpack_weight(weight)))
