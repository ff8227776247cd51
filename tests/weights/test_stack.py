"""Weights of several matrices: stacked, taken apart, unpacked and quantized."""

from __future__ import annotations

import numpy as np
import pytest

from engine.errors import WeightsError
from engine.testing.cases_quantized import BYTE_FORMATS, PACKED_FORMATS, random_weight
from engine.weights import FORMATS, unpack_weight
from engine.weights.quantize import QUANTIZABLE, quantize
from engine.weights.stack import matrices, stack_matrices, take_matrices


@pytest.mark.parametrize("name", [*PACKED_FORMATS, *BYTE_FORMATS])
def test_stacked_matrices_come_back(name):
    parts = [random_weight(name, 32, 130, seed) for seed in range(4)]
    whole = stack_matrices(parts)
    assert whole.shape == (4, 32, 130)
    numbers = unpack_weight(whole)
    for part, matrix, number in zip(parts, matrices(whole), numbers, strict=True):
        np.testing.assert_array_equal(unpack_weight(matrix), unpack_weight(part))
        np.testing.assert_array_equal(number, unpack_weight(part))
    taken = take_matrices(whole, 1, 3)
    assert taken.shape == (2, 32, 130)
    np.testing.assert_array_equal(unpack_weight(taken), numbers[1:3])


@pytest.mark.parametrize("name", QUANTIZABLE)
def test_quantize_takes_several_matrices(name):
    array = np.random.default_rng(1).standard_normal((3, 48, 100), np.float32)
    whole = quantize(array, FORMATS[name])
    assert whole.shape == array.shape
    for matrix, numbers in zip(array, unpack_weight(whole), strict=True):
        np.testing.assert_array_equal(unpack_weight(quantize(matrix, FORMATS[name])), numbers)


def test_what_cannot_be_stacked():
    one = random_weight("q4_0", 16, 64)
    with pytest.raises(WeightsError, match="must have the same format and shape"):
        stack_matrices([one, random_weight("q4_0", 32, 64)])
    with pytest.raises(WeightsError, match="must have the same format and shape"):
        stack_matrices([one, random_weight("q8_0", 16, 64)])
    with pytest.raises(WeightsError, match="rows of q4_0 must be a multiple of 16; got 24"):
        stack_matrices([random_weight("q4_0", 24, 64)])
    with pytest.raises(WeightsError, match="must not have permuted columns"):
        stack_matrices([random_weight("int4_g32", 16, 64, permuted=True)])
