"""Hash chains over a sequence's n-grams, to find earlier occurrences of its last tokens.

For each of several lengths n, `head` maps a hash to the last position at which an n-gram with this
hash ended, and `link` maps each position to the previous one: a chain from the latest occurrence to
the earliest, as in LZ77 compressors. Adding a token costs a few additions and one entry in each
array; only the chain of the last position is ever searched.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["NgramIndex"]

_BASE = 0x9E3779B97F4A7C15 & (2**60 - 1)  # multiplier of the hash; odd
_MASK = 2**60 - 1  # hashes are polynomials in _BASE modulo 2**60: two digits of a Python int
_BULK = 64  # minimum number of tokens at which NumPy is faster
_LOAD = 4  # tokens per chain beyond which the index is rebuilt with more chains


class _Chains:
    """End positions of n-grams, chained by equal hash."""

    __slots__ = ("_hash", "_head", "_leaving", "_shift", "link", "n")

    def __init__(self, n: int, num_bits: int) -> None:
        self.n = n
        self.link = array("i")
        self._head = array("i", [-1]) * (1 << num_bits)
        self._shift = 60 - num_bits
        # Hash of the last n tokens: sum of token * _BASE ** (1 + distance from the last).
        self._hash = 0
        self._leaving = pow(_BASE, n + 1, 2**60)

    def append(self, ids: Sequence[int], start: int) -> None:
        """Add the n-grams of `ids` that end at `start` or later, one by one."""
        n = self.n
        value = self._hash
        power = self._leaving
        shift = self._shift
        head = self._head
        link = self.link
        for position in range(start, len(ids)):
            leaving = ids[position - n] if position >= n else 0
            value = ((value + ids[position]) * _BASE - leaving * power) & _MASK
            if position < n - 1:
                link.append(-1)
                continue
            bucket = value >> shift
            link.append(head[bucket])
            head[bucket] = position
        self._hash = value

    def extend(self, hashes: Any, start: int) -> None:
        """Add n-grams that end at `start` and the following positions, by hash, (T,) uint64."""
        self._hash = int(hashes[-1]) & _MASK
        skipped = max(0, self.n - 1 - start)
        self.link.extend([-1] * min(skipped, len(hashes)))
        buckets = ((hashes[skipped:] & np.uint64(_MASK)) >> np.uint64(self._shift)).astype(np.int64)
        if not len(buckets):
            return
        # Sort by bucket, then by position; link the neighbours within a bucket.
        order = np.sort(buckets << 32 | np.arange(len(buckets))) & 0xFFFFFFFF
        buckets = buckets[order]
        positions = (order + start + skipped).astype(np.int32)
        head = np.frombuffer(self._head, np.int32)
        is_first = np.append(True, buckets[1:] != buckets[:-1])
        earlier = np.where(is_first, head[buckets], np.roll(positions, 1))
        is_last = np.append(is_first[1:], True)
        head[buckets[is_last]] = positions[is_last]
        link = np.empty(len(order), np.int32)
        link[order] = earlier
        self.link.frombytes(link.tobytes())


class NgramIndex:
    """Finds earlier occurrences of a sequence's last tokens.

    Parameters
    ----------
    shortest, longest : int
        Minimum match length, and the length at which comparison stops, in tokens.
    num_tokens : int
        Expected length of the sequence; `is_full` tells when it has grown far beyond.
    max_candidates : int
        Maximum number of steps along a chain.

    Attributes
    ----------
    token_ids : list of int
        The tokens read so far.
    num_steps : int
        Number of chain steps taken so far.

    Examples
    --------
    >>> index = NgramIndex(2, 8, num_tokens=100)
    >>> index.extend([1, 2, 3, 9, 1, 2, 3, 8, 2, 3])
    >>> index.matches()  # both end with 2, 3; the latest comes first
    (2, [6, 2])
    """

    __slots__ = ("_capacity", "_chains", "_longest", "_max_candidates", "num_steps", "token_ids")

    def __init__(
        self, shortest: int, longest: int, *, num_tokens: int, max_candidates: int = 64
    ) -> None:
        self.token_ids: list[int] = []
        self.num_steps = 0
        num_bits = max(8, num_tokens.bit_length())
        self._capacity = _LOAD << num_bits
        self._longest = longest
        self._max_candidates = max_candidates
        self._chains = [_Chains(n, num_bits) for n in _lengths(shortest, longest)]

    @property
    def is_full(self) -> bool:
        """Tell whether the sequence has outgrown the index, so that a larger one is faster."""
        return len(self.token_ids) > self._capacity

    def extend(self, token_ids: Sequence[int]) -> None:
        """Read the next tokens."""
        start = len(self.token_ids)
        self.token_ids += token_ids
        if len(token_ids) >= _BULK:
            self._extend_bulk(start)
            return
        for chains in self._chains:
            chains.append(self.token_ids, start)

    def matches(self, *, all_of_them: bool = True) -> tuple[int, list[int]]:
        """Return the length of the longest match and its end positions, latest first.

        (0, []) without a match. At most the latest `max_candidates` occurrences of an n-gram are
        visited. A match may overlap the last tokens.

        Parameters
        ----------
        all_of_them : bool
            False: return only the latest occurrence.
        """
        last = len(self.token_ids) - 1
        for chains in reversed(self._chains):
            if last >= 0 and chains.link[last] >= 0:
                length, ends = self._walk(chains, last, all_of_them)
                if ends:
                    return length, ends
        return 0, []

    def _walk(self, chains: _Chains, last: int, all_of_them: bool) -> tuple[int, list[int]]:
        """Return the result of `matches` among the occurrences in `chains`."""
        ids = self.token_ids
        link = chains.link
        longest = self._longest
        best = chains.n
        ends: list[int] = []
        wanted = ids[last + 1 - best : last + 1]
        at = link[last]
        for _ in range(self._max_candidates):
            if at < 0:
                break
            self.num_steps += 1
            if at >= best - 1 and ids[at + 1 - best : at + 1] == wanted:
                length = self._length(at, last, best)
                if length > best:
                    best = length
                    ends = []
                    wanted = ids[last + 1 - best : last + 1]
                if all_of_them or not ends:
                    ends.append(at)
                if best == longest and not all_of_them:
                    break
            at = link[at]
        return best, ends

    def _length(self, at: int, last: int, known: int) -> int:
        """Return the number of equal tokens before `at` and `last`, inclusive, up to `longest`."""
        ids = self.token_ids
        most = min(self._longest, at + 1)
        while known < most and ids[at - known] == ids[last - known]:
            known += 1
        return known

    def _extend_bulk(self, start: int) -> None:
        """Add the n-grams that end at `start` or later, with NumPy."""
        longest = self._chains[-1].n
        first = max(0, start + 1 - longest)
        ids = np.array(self.token_ids[first:], np.uint64)
        padded = np.append(np.zeros(longest - 1 - (start - first), np.uint64), ids)
        count = len(self.token_ids) - start
        hashes = np.zeros(count, np.uint64)
        power = 1
        distance = 0
        for chains in self._chains:
            while distance < chains.n:
                power = power * _BASE & _MASK
                begin = longest - 1 - distance
                hashes += padded[begin : begin + count] * np.uint64(power)
                distance += 1
            chains.extend(hashes, start)


def _lengths(shortest: int, longest: int) -> list[int]:
    """Return the n-gram lengths to index: `shortest`, doubled repeatedly, and `longest`.

    The chains of a long n-gram offer few candidates, however frequent the last tokens are.
    """
    lengths = [shortest]
    while 2 * lengths[-1] < longest:
        lengths.append(2 * lengths[-1])
    return [*lengths, longest] if longest > shortest else lengths
