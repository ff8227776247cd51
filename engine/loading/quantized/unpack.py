"""Whole numbers of 4 or 8 bits, packed in 32-bit words."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["as_signed", "unpack_awq", "unpack_words"]

Array = np.ndarray[Any, Any]

# Place in its word of each of AWQ's eight columns.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


def unpack_words(words: Array, bits: int) -> Array:
    """Return the numbers (..., W 32 / bits) uint8 of words (..., W), the lowest bits first.

    Examples
    --------
    >>> unpack_words(np.array([[0x76543210]], np.int32), 4)
    array([[0, 1, 2, 3, 4, 5, 6, 7]], dtype=uint8)
    """
    data = np.ascontiguousarray(words, "<i4").view(np.uint8)
    if bits == 8:
        return data
    numbers = np.empty((*data.shape, 2), np.uint8)
    np.bitwise_and(data, 15, out=numbers[..., 0])
    np.right_shift(data, 4, out=numbers[..., 1])
    return numbers.reshape(*data.shape[:-1], 2 * data.shape[-1])


def unpack_awq(words: Array) -> Array:
    """As `unpack_words` of 4 bits, in AWQ's order: even columns are in a word's low half.

    Examples
    --------
    >>> unpack_awq(np.array([[0x75316420]], np.int32))
    array([[0, 1, 2, 3, 4, 5, 6, 7]], dtype=uint8)
    """
    stored = unpack_words(words, 4)
    words_of_8 = stored.reshape(*stored.shape[:-1], stored.shape[-1] // 8, 8)
    ordered: Array = words_of_8[..., _AWQ_PLACES].reshape(stored.shape)
    return ordered


def as_signed(numbers: Array) -> Array:
    """Return numbers of 0 to 255 less 128, as int8.

    Examples
    --------
    >>> as_signed(np.array([0, 128, 255], np.uint8))
    array([-128,    0,  127], dtype=int8)
    """
    signed: Array = (numbers ^ 0x80).view(np.int8)
    return signed
