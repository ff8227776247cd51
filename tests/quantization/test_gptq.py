"""GPTQ: what it has in common with rounding to the nearest, and how much better it is."""

from __future__ import annotations

import numpy as np
import pytest

from engine.errors import WeightsError
from engine.quantization.gptq import Hessian, gptq
from engine.weights import FORMATS
from engine.weights.quantize import dequantize_codes, round_to_codes

_NAMES = ("int4_g128", "int4_g32", "int4_g64_zp", "int8_g64")


def _inputs(tokens, columns, seed):
    """Inputs whose columns are correlated, as those of a layer are."""
    rng = np.random.default_rng(seed)
    mix = np.random.default_rng(9).standard_normal((columns, columns))
    mix *= np.exp(-np.arange(columns) / (columns / 6))[:, None]
    return (rng.standard_normal((tokens, columns)) @ mix).astype(np.float32)


def _matrix(rows, columns, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


def _hessian(x):
    hessian = Hessian()
    for part in np.array_split(x, 3):
        hessian.add(part)
    return hessian.total


def _same(one, other):
    return all(
        (a is None and b is None) or np.array_equal(a, b) for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("name", _NAMES)
@pytest.mark.parametrize("shape", [(48, 256), (1, 128), (5, 200)])
def test_without_correlation_it_is_rounding_to_the_nearest(name, shape):
    form, matrix = FORMATS[name], _matrix(*shape)
    diagonal = np.diag(np.random.default_rng(1).uniform(0.5, 2, shape[1])).astype(np.float32)
    assert _same(gptq(matrix, diagonal, form), round_to_codes(matrix, form))


@pytest.mark.parametrize("name", _NAMES)
@pytest.mark.parametrize("shape", [(48, 256), (1, 256), (48, 200)])
def test_less_than_half_of_the_error_on_held_out_inputs(name, shape):
    form, matrix = FORMATS[name], _matrix(*shape)
    made = gptq(matrix, _hessian(_inputs(2000, shape[1], 1)), form)
    held_out = _inputs(500, shape[1], 2)

    def error(codes):
        return np.linalg.norm(held_out @ (dequantize_codes(form, codes) - matrix).T)

    most = 0.6 if shape[0] == 1 else 0.5
    assert error(made) < most * error(round_to_codes(matrix, form))
    low, high = form.code_range
    assert low <= made.codes.min() and made.codes.max() <= high


def test_columns_without_inputs_are_rounded_to_the_nearest():
    form, matrix, x = FORMATS["int4_g32"], _matrix(16, 128), _inputs(500, 128, 3)
    x[:, 32:64] = 0
    made, nearest = gptq(matrix, _hessian(x), form), round_to_codes(matrix, form)
    assert np.array_equal(made.codes[:, 32:64], nearest.codes[:, 32:64])
    none = gptq(matrix, np.zeros((128, 128), np.float32), form)
    assert _same(none, nearest)


def test_fewer_tokens_than_columns():
    form, matrix = FORMATS["int4_g32"], _matrix(16, 256)
    made = gptq(matrix, _hessian(_inputs(20, 256, 4)), form)
    assert np.isfinite(dequantize_codes(form, made)).all()


def test_numbers_of_the_grid_stay():
    form = FORMATS["int4_g32_zp"]
    matrix = np.random.default_rng(5).integers(-7, 9, (16, 128)).astype(np.float32)
    matrix[:, ::32], matrix[:, 1::32] = -7, 8  # the ends of the codes, for scale 1
    made = gptq(matrix, _hessian(_inputs(500, 128, 6)), form)
    assert np.array_equal(dequantize_codes(form, made), matrix)
    assert _same(gptq(matrix, _hessian(_inputs(500, 128, 6)), form), made)


def test_scales_are_exact_in_the_dtype_asked_for():
    made = gptq(_matrix(16, 64), np.eye(64, dtype=np.float32), FORMATS["int4_g32"],
                scale_dtype="bfloat16")  # fmt: skip
    assert not (made.scales.view(np.uint32) & 0xFFFF).any()


def test_refused():
    eye = np.eye(64, dtype=np.float32)
    with pytest.raises(WeightsError, match=r"format must be one of int4_g\* and int8_g\*; got 'fp"):
        gptq(_matrix(2, 64), eye, FORMATS["fp8"])
    with pytest.raises(WeightsError, match="matrix and inputs must have finite numbers only"):
        gptq(_matrix(2, 64), np.full((64, 64), np.inf, np.float32), FORMATS["int4_g32"])
    with pytest.raises(WeightsError, match="must be positive definite"):
        gptq(_matrix(2, 64), -eye - 1e7 * (1 - eye), FORMATS["int4_g32"])
