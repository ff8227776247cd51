"""Rounding to a format: every number takes the nearest code, and errors have the expected size."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from engine.errors import WeightsError
from engine.weights import FORMATS, unpack_weight
from engine.weights.quantize import QUANTIZABLE, _e4m3_bits, quantize, resolve_format


def _matrix(rows, columns, seed=0):
    rng = np.random.default_rng(seed)
    scale = np.exp(rng.standard_normal((rows, 1)))
    return (rng.standard_normal((rows, columns)) * scale).astype(np.float32)


# Root of the mean squared error over that of the numbers, for normal ones: as measured, rounded up.
_ERRORS = {"fp8": 0.03, "fp8_block": 0.03, "int8": 0.01, "mxfp4": 0.14, "q6_k": 0.02}


@pytest.mark.parametrize("name", QUANTIZABLE)
@pytest.mark.parametrize("shape", [(32, 256), (21, 200)])
def test_error_is_of_the_formats_size(name, shape):
    array, form = _matrix(*shape), FORMATS[name]
    weight = quantize(array, form)
    error = unpack_weight(weight) - array
    relative = np.sqrt((error**2).sum() / (array**2).sum())
    most = _ERRORS.get(name, 0.12 if form.bits == 4 else 0.01)
    assert 1e-4 < relative < most, relative
    assert weight.shape == shape and weight.format is form


@pytest.mark.parametrize("name", ["int4_g32", "int8_g64", "mxfp4", "q8_0", "q6_k", "int4_g32_zp"])
def test_no_other_code_is_nearer(name):
    """With the scales it chose, the stored number is the nearest that the group can have."""
    array, form = _matrix(4, 128, 1), FORMATS[name]
    weight = quantize(array, form)
    made = unpack_weight(weight)
    for row in range(4):
        for first in range(0, 128, form.group):
            group = slice(first, first + form.group)
            # All numbers of the group's grid that occur, which are candidates for every member.
            grid = np.unique(made[row, group])
            nearest = np.abs(array[row, group, None] - grid).min(axis=1)
            got = np.abs(array[row, group] - made[row, group])
            np.testing.assert_allclose(got, nearest, atol=1e-6)


def test_numbers_of_the_grid_stay():
    """What a format can hold exactly comes back exactly."""
    codes = np.random.default_rng(2).integers(-7, 8, (16, 64)).astype(np.float32)
    codes[:, ::32] = 7.5 * np.sign(codes[:, ::32] + 0.5)  # the largest magnitude, for scale 1
    made = unpack_weight(quantize(codes, FORMATS["int4_g32"]))
    np.testing.assert_allclose(made[:, 1:32], codes[:, 1:32], atol=1e-3)


@pytest.mark.parametrize("name", ["q6_k", "q8_0", "int4_g32_zp"])
def test_a_large_matrix_is_rounded_in_parts(monkeypatch, name):
    array, form = _matrix(75, 300), FORMATS[name]
    whole = quantize(array, form)
    monkeypatch.setattr("engine.weights.quantize._PART_ROWS", 32)
    parts = quantize(array, form)
    assert parts.shape == (75, 300)
    for (_, wanted), (_, got) in zip(whole.arrays(), parts.arrays(), strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_e4m3_bits_are_those_of_ml_dtypes():
    codes = np.arange(256, dtype=np.uint8)
    exact = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    finite = exact[np.isfinite(exact)]
    between = (finite[:, None] + np.array([0, 0.3, 0.5, 0.7]) * np.abs(finite[:, None]) / 8).ravel()
    numbers = np.concatenate([finite, between, np.float32([0, -0.0, 2**-9, 2**-10, 1e-9])])
    numbers = np.clip(numbers, -448, 448).astype(np.float32)
    wanted = numbers.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(_e4m3_bits(numbers), wanted)


def test_zeros_and_extremes():
    for name in QUANTIZABLE:
        assert not unpack_weight(quantize(np.zeros((3, 70), np.float32), FORMATS[name])).any()
    array = np.zeros((2, 64), np.float32)
    array[0, 3] = 1e-6
    for name in ("fp8", "int8"):
        made = unpack_weight(quantize(array, FORMATS[name]))
        np.testing.assert_allclose(made, array, rtol=1e-3)


def test_names():
    assert resolve_format("int4") is FORMATS["int4_g128"]
    with pytest.raises(
        WeightsError, match=r"quantization must be one of int4, fp8, .*; got 'q4_k'"
    ):
        resolve_format("q4_k")
    for name in ("q4_1", "q4_k", "float16"):
        with pytest.raises(WeightsError, match=f"form must be one of fp8, .*; got '{name}'"):
            quantize(np.ones((2, 256), np.float32), FORMATS[name])
    with pytest.raises(WeightsError, match="array must have finite numbers only"):
        quantize(np.full((2, 32), np.nan, np.float32), FORMATS["fp8"])
    for name in ("int4_g128", "int8_g128", "q6_k"):
        with pytest.raises(WeightsError, match=r"at most 65504, .*; got a scale of "):
            quantize(np.full((2, 256), 1e30, np.float32), FORMATS[name])
    with pytest.raises(WeightsError, match="array must be a matrix, or several; got 1 dimensions"):
        quantize(np.ones(32, np.float32), FORMATS["fp8"])
