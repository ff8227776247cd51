"""DRY: penalties on tokens that would continue a repetition ("Don't Repeat Yourself")."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["DryRule"]

_MAX_MATCH = 256  # tokens; a longer repetition is penalised as one of this length
_MAX_PENALTY = 1e4  # logits; in effect a ban
_MOST_NEPERS = 60.0  # logarithm of the largest power that is computed


@dataclass(frozen=True)
class DryRule:
    """The penalties of one request.

    Attributes
    ----------
    multiplier, base : float
        A token that would extend a repetition of n tokens is penalised by
        multiplier * base ** (n - allowed_length).
    allowed_length : int
        Length of repetitions up to which a further token is free.
    last_n : int
        Number of last tokens to search; -1: all.
    is_breaker : callable
        Tells whether a token id ends repetitions, such as that of a line break.

    Examples
    --------
    >>> rule = DryRule(2.0, 3.0, 2, -1, lambda token: token == 0)
    >>> rule.penalties([5, 6, 7, 9, 5, 6])
    {7: 2.0}
    >>> rule.penalties([4, 5, 6, 7, 9, 4, 5, 6]), rule.penalties([5, 0, 7, 9, 5, 0])
    ({7: 6.0}, {})
    """

    multiplier: float
    base: float
    allowed_length: int
    last_n: int
    is_breaker: Callable[[int], bool]

    def penalties(self, token_ids: Sequence[int]) -> dict[int, float]:
        """Return what to subtract from the logits of the token after `token_ids`, by id."""
        ids = np.array(token_ids if self.last_n < 0 else token_ids[-self.last_n :], np.int64)
        count = len(ids)
        if self.last_n == 0 or count < 2 or self.is_breaker(int(ids[-1])):
            return {}
        ends = np.flatnonzero(ids[:-1] == ids[-1])  # last tokens of earlier occurrences
        lengths = np.ones(len(ends), np.int64)
        alive = np.arange(len(ends))
        for back in range(1, min(count, _MAX_MATCH)):
            token = int(ids[count - 1 - back])
            if not alive.size or self.is_breaker(token):
                break
            before = ends[alive] - back
            alive = alive[(before >= 0) & (ids[np.maximum(before, 0)] == token)]
            lengths[alive] += 1
        longest: dict[int, int] = {}
        for end, length in zip(ends.tolist(), lengths.tolist(), strict=True):
            following = int(ids[end + 1])
            longest[following] = max(longest.get(following, 0), length)
        return {
            token: self._penalty(length)
            for token, length in longest.items()
            if length >= self.allowed_length and not self.is_breaker(token)
        }

    def _penalty(self, length: int) -> float:
        exponent = length - self.allowed_length
        if exponent * math.log(self.base) > _MOST_NEPERS:
            return _MAX_PENALTY
        return min(self.multiplier * self.base**exponent, _MAX_PENALTY)
