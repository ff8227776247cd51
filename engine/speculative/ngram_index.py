"""Where the last tokens of a sequence came before in it: hash chains over its n-grams.

For each of a few lengths n, `head` has the last position at which an n-gram of a hash ended, and
`link` the one before, for every position: a chain from the latest occurrence to the earliest, as
LZ77 compressors have them. A token costs a few additions and one entry in each of the arrays;
nothing is ever searched but the chain of the last position.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["NgramIndex"]

_BASE = 0x9E3779B97F4A7C15 & (2**60 - 1)  # odd
_MASK = 2**60 - 1  # hashes are polynomials in _BASE, modulo 2**60: two digits of a Python int
_BULK = 64  # tokens from which NumPy is faster
_LOAD = 4  # tokens per chain, above which the chains are too few


class _Chains:
    """Positions at which n-grams end, in chains of equal hashes."""

    __slots__ = ("_hash", "_head", "_leaving", "_shift", "link", "n")

    def __init__(self, n: int, num_bits: int) -> None:
        self.n = n
        self.link = array("i")
        self._head = array("i", [-1]) * (1 << num_bits)
        self._shift = 60 - num_bits
        self._hash = 0  # of the last n tokens: sum of token * _BASE ** (1 + distance from the last)
        self._leaving = pow(_BASE, n + 1, 2**60)

    def append(self, ids: Sequence[int], start: int) -> None:
        """Add the n-grams of `ids` that end at `start` and after, one by one."""
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
        """Add the n-grams with these hashes, (T,) uint64, that end at `start` and after."""
        self._hash = int(hashes[-1]) & _MASK
        skipped = max(0, self.n - 1 - start)
        self.link.extend([-1] * min(skipped, len(hashes)))
        buckets = ((hashes[skipped:] & np.uint64(_MASK)) >> np.uint64(self._shift)).astype(np.int64)
        if not len(buckets):
            return
        # Sorted by bucket, and by position within: neighbours of a bucket are linked.
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
        Lengths of a match that count: one of fewer tokens is none, and more are not compared.
    num_tokens : int
        How long the sequence is about; `is_full` tells when it has become much longer.
    max_candidates : int
        Maximum steps along a chain.

    Attributes
    ----------
    token_ids : list of int
        The tokens that were read.
    num_steps : int
        Steps along chains so far.

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
        """Tell whether an index for more tokens would be faster."""
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
        """Return the longest match's length, and where its occurrences end, the latest first.

        (0, []) if there is none. Of an n-gram that is more frequent, the latest `max_candidates`
        occurrences count. A match may overlap the last tokens.

        Parameters
        ----------
        all_of_them : bool
            False: the latest occurrence is enough.
        """
        last = len(self.token_ids) - 1
        for chains in reversed(self._chains):
            if last >= 0 and chains.link[last] >= 0:
                length, ends = self._walk(chains, last, all_of_them)
                if ends:
                    return length, ends
        return 0, []

    def _walk(self, chains: _Chains, last: int, all_of_them: bool) -> tuple[int, list[int]]:
        """Return what `matches` does, among those of at least the length of these chains."""
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
        """Return how many tokens up to `at` and up to `last` are equal, at most `longest`."""
        ids = self.token_ids
        most = min(self._longest, at + 1)
        while known < most and ids[at - known] == ids[last - known]:
            known += 1
        return known

    def _extend_bulk(self, start: int) -> None:
        """Add the n-grams that end at `start` and after, with NumPy."""
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
    """Return the lengths of n-grams that have chains.

    A long match is looked for among few candidates, whatever its last tokens are.
    """
    lengths = [shortest]
    while 2 * lengths[-1] < longest:
        lengths.append(2 * lengths[-1])
    return [*lengths, longest] if longest > shortest else lengths
