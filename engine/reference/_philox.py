"""Philox4x32-10, and Gumbel noise from it. In CUDA: `sample/philox.cuh`."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.reference._exact_math import log2, log2_one_plus

__all__ = ["gumbel", "gumbel_all", "philox4x32"]

Array = np.ndarray[Any, Any]

_LOW = np.uint64(0xFFFFFFFF)
_MULTIPLY = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_ROUNDS = 10
_SQRT_HALF = np.uint32(0xB504F334)  # smallest word with u >= sqrt(1/2)


def philox4x32(counter: tuple[Any, Any, Any, Any], key: tuple[Any, Any]) -> list[Array]:
    """Return the random words of `counter` under `key`.

    Parameters
    ----------
    counter : four arrays of uint64, values below 2**32
        They broadcast against each other and the key.
    key : two arrays of uint64, values below 2**32

    Returns
    -------
    list of four uint32 arrays

    Notes
    -----
    Philox4x32-10 of [1]_: ten rounds of two 32x32 -> 64 bit products.

    References
    ----------
    .. [1] Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3. SC 2011.

    Examples
    --------
    >>> zero = np.zeros(1, np.uint64)
    >>> [hex(w[0]) for w in philox4x32((zero,) * 4, (zero, zero))]
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0 = c0 * _MULTIPLY[0]
        p1 = c2 * _MULTIPLY[1]
        c0 = (p1 >> np.uint64(32)) ^ c1 ^ k0
        c1 = p1 & _LOW
        c2 = (p0 >> np.uint64(32)) ^ c3 ^ k1
        c3 = p0 & _LOW
        k0 = (k0 + _WEYL[0]) & _LOW
        k1 = (k1 + _WEYL[1]) & _LOW
    return [np.asarray(c).astype(np.uint32) for c in (c0, c1, c2, c3)]


def gumbel(seeds: Array, positions: Array, ids: Array) -> Array:
    """Return the Gumbel noise of token `ids` at `positions` under `seeds`, all of one shape.

    It is -log2(-log2(u)), a standard Gumbel variable divided by ln 2 (up to a constant that does
    not change an argmax), with u = (word + 1/2) / 2**32, never 0 or 1. It uses word
    ``id % 4`` of counter (id // 4, position, 0) under the key `seed`.
    """
    words = _words(seeds, positions, ids.astype(np.uint64) >> np.uint64(2))
    return _noise(np.choose(ids & 3, words))


def gumbel_all(seeds: Array, positions: Array, vocab_size: int) -> Array:
    """Return the noise (B, V) float32 of ids 0..V-1 for `seeds` (B,) and `positions` (B,)."""
    groups = np.arange(-(-vocab_size // 4), dtype=np.uint64)
    words = _words(seeds[:, None], positions[:, None], groups[None, :])
    return _noise(np.stack(words, axis=-1).reshape(len(seeds), -1)[:, :vocab_size])


def _words(seeds: Array, positions: Array, groups: Array) -> list[Array]:
    at = positions.astype(np.uint64)
    high = np.uint64(32)
    counter = (groups, at & _LOW, at >> high, np.zeros_like(at))
    return philox4x32(counter, (seeds & _LOW, seeds >> high))


def _noise(word: Array) -> Array:
    """-log2(-log2((word + 1/2) / 2**32)); uses 1 - u near u = 1 to avoid cancellation."""
    half = np.float32(0.5)
    minus_log = np.float32(32) - log2(word.astype(np.float32) + half)
    rest = (~word).astype(np.float32) + half
    tail = -log2_one_plus(-np.minimum(rest, np.float32(2**31)) * np.float32(2**-32))
    return -log2(np.where(word >= _SQRT_HALF, tail, minus_log))
