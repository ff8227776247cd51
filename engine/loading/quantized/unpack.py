"""Unpack 4-bit and 8-bit integers from 32-bit words."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["as_signed", "unpack_awq", "unpack_nibbles", "unpack_words"]

Array = np.ndarray[Any, Any]

# AWQ: position in its word of each of eight columns.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


def unpack_words(words: Array, bits: int) -> Array:
    """Return the integers (..., W 32 / bits) uint8 packed in words (..., W), lowest bits first.

    Examples
    --------
    >>> unpack_words(np.array([[0x76543210]], np.int32), 4)
    array([[0, 1, 2, 3, 4, 5, 6, 7]], dtype=uint8)
    """
    data = np.ascontiguousarray(words, "<i4").view(np.uint8)
    return data if bits == 8 else unpack_nibbles(data)


def unpack_nibbles(data: Array) -> Array:
    """Return the integers (..., 2 C) uint8 packed in bytes (..., C), low nibble first."""
    numbers = np.empty((*data.shape, 2), np.uint8)
    np.bitwise_and(data, 15, out=numbers[..., 0])
    np.right_shift(data, 4, out=numbers[..., 1])
    return numbers.reshape(*data.shape[:-1], 2 * data.shape[-1])


def unpack_awq(words: Array) -> Array:
    """Return the integers (8 W, R) uint8 packed in AWQ's words (R, W), eight columns per word.

    Examples
    --------
    >>> unpack_awq(np.array([[0x75316420]], np.int32)).T
    array([[0, 1, 2, 3, 4, 5, 6, 7]], dtype=uint8)
    """
    num_rows, num_words = words.shape
    data = np.ascontiguousarray(words.T, "<i4").view(np.uint8).reshape(num_words, num_rows, 4)
    numbers = np.empty((num_words, 8, num_rows), np.uint8)
    for column, place in enumerate(_AWQ_PLACES):
        halves = data[..., place // 2]
        numbers[:, column] = halves >> 4 if place % 2 else halves & 15
    return numbers.reshape(8 * num_words, num_rows)


def as_signed(numbers: Array) -> Array:
    """Return uint8 numbers minus 128, as int8.

    Examples
    --------
    >>> as_signed(np.array([0, 128, 255], np.uint8))
    array([-128,    0,  127], dtype=int8)
    """
    signed: Array = (numbers ^ 0x80).view(np.int8)
    return signed
