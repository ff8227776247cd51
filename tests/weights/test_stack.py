"""Weights of several matrices: stacked, taken apart, unpacked and quantized."""

from __future__ import annotations

import numpy as np
import pytest

from engine.errors import WeightsError
from engine.testing.cases_quantized import BYTE_FORMATS, PACKED_FORMATS, random_weight
from engine.weights import FORMATS, Weight, unpack_weight
from engine.weights.quantize import QUANTIZABLE, quantize
from engine.weights.stack import append, appended, matrices, stack_matrices, take_matrices


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


@pytest.mark.parametrize("name", [*PACKED_FORMATS, *BYTE_FORMATS])
def test_an_appended_matrix_lies_behind_the_others(name):
    *parts, last = (random_weight(name, 32, 130, seed) for seed in range(4))
    weight = stack_matrices(parts)
    assert appended(weight, last) is None
    pair = append(weight, last)
    for view, original in zip(pair, (weight, last), strict=True):
        assert view.shape == original.shape and view.num_bytes == original.num_bytes
        np.testing.assert_array_equal(unpack_weight(view), unpack_weight(original))
    whole = appended(*pair)
    assert whole.shape == (4, 32, 130)
    np.testing.assert_array_equal(unpack_weight(whole)[3], unpack_weight(last))
    np.testing.assert_array_equal(unpack_weight(whole)[:3], unpack_weight(weight))
    other = append(weight, last)
    assert appended(pair[0], other[1]) is None
    assert np.shares_memory(whole.data, pair[1].data)


def test_appended_rows_and_what_cannot_be_appended():
    rows = Weight.dense(np.arange(12, dtype=np.float32).reshape(3, 4))
    one = Weight.dense(np.full((1, 4), 7, np.float32))
    assert appended(*append(rows, one)).data[2:].tolist() == [[8, 9, 10, 11], [7, 7, 7, 7]]
    with pytest.raises(
        WeightsError, match=r"last must have .* float32 \(3, 4\); got float32 \(1, 3"
    ):
        append(rows, Weight.dense(np.zeros((1, 3), np.float32)))
    with pytest.raises(WeightsError, match=r"last must have .* got float16"):
        append(rows, Weight.dense(np.zeros((1, 4), np.float16)))


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
