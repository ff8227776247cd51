"""Distances of next-token distributions from float64, and whether one is larger than another's.

Logits are centred (their mean over the vocabulary is subtracted): a constant added to all logits of
a token changes no probability, and log-probabilities compare like logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["METRICS", "Comparison", "Distance", "compare"]

Array = np.ndarray[Any, np.dtype[np.float64]]

BLOCK = 8  # consecutive tokens resampled together, since they share keys and values
_MIN_BLOCKS = 4  # fewest blocks that give a standard error
_RESAMPLES = 1000
_ROWS_AT_ONCE = 64  # limits the float64 copies of logits
_SIGNIFICANT = 3.0  # standard errors: 1 of 740 comparisons of equals falls outside by chance


@dataclass(frozen=True)
class Distance:
    """Distance of each of N tokens' distributions from the reference's.

    Attributes
    ----------
    squared_error, squared_reference : (N,) array of float64
        Means over the vocabulary of the squared error and of the squared reference logit.
    largest_error : (N,) array of float64
        Largest error of a token's logits.
    kl : (N,) array of float64
        KL divergence from the reference, in nats.
    is_other_top1 : (N,) array of float64
        1 where the most likely token differs, else 0.
    """

    squared_error: Array
    squared_reference: Array
    largest_error: Array
    kl: Array
    is_other_top1: Array

    @classmethod
    def of(cls, logits: Any, reference: Any) -> Distance:
        """Compare `logits` (N, V), or log-probabilities, with the `reference` (N, V)."""
        if logits.shape != reference.shape:
            raise ValueError(f"logits must have the shape {reference.shape}; got {logits.shape}")
        return cls(*map(np.concatenate, zip(*_rows(logits, reference), strict=True)))


def _rows(logits: Any, reference: Any) -> Iterator[tuple[Array, ...]]:
    """Yield the columns of `Distance` of some rows at a time."""
    for start in range(0, len(reference), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        found, expected = (_centred(x[rows]) for x in (logits, reference))
        error = found - expected
        log_p, log_q = _log_softmax(expected), _log_softmax(found)
        yield (
            np.mean(error**2, axis=-1),
            np.mean(expected**2, axis=-1),
            np.abs(error).max(axis=-1),
            np.sum(np.exp(log_p) * (log_p - log_q), axis=-1),
            (found.argmax(axis=-1) != expected.argmax(axis=-1)).astype(np.float64),
        )


def _centred(x: Any) -> Array:
    wide = np.asarray(x, np.float64)
    return wide - wide.mean(axis=-1, keepdims=True)


def _log_softmax(x: Array) -> Array:
    shifted = x - x.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def _root_ratio(squares: Array, references: Array) -> Array:
    return np.sqrt(squares.mean(axis=-1) / references.mean(axis=-1))


METRICS: Mapping[str, Callable[[Distance, Any], Array]] = {
    "rms": lambda d, i: _root_ratio(d.squared_error[i], d.squared_reference[i]),
    "max": lambda d, i: (
        d.largest_error[i].mean(axis=-1) / np.sqrt(d.squared_reference[i].mean(axis=-1))
    ),
    "kl_mean": lambda d, i: d.kl[i].mean(axis=-1),
    "kl_median": lambda d, i: np.median(d.kl[i], axis=-1),
    "kl_p99": lambda d, i: np.percentile(d.kl[i], 99, axis=-1),
    "top1_other": lambda d, i: d.is_other_top1[i].mean(axis=-1),
}
"""Metric -> its value for the tokens of an index (N,), or of many indices (R, N): (R,).

- rms: relative RMS error of the logits.
- max: a token's largest error relative to the RMS of all logits, mean over tokens.
- kl_mean, kl_median, kl_p99: KL divergence in nats: mean, median and 99th percentile over tokens.
  A few tokens of which rounding changes an expert decide the mean; they leave the median alone.
- top1_other: share of tokens whose most likely next token differs.
"""


@dataclass(frozen=True)
class Comparison:
    """A metric of two implementations on the same tokens.

    Attributes
    ----------
    ours, peers : float
    error : float
        Standard error of ``ours - peers``, from a paired bootstrap over blocks of tokens.
    """

    ours: float
    peers: float
    error: float

    @property
    def ratio(self) -> float:
        """``ours / peers``; 1 if both are 0."""
        if self.ours == self.peers:
            return 1.0
        return self.ours / self.peers if self.peers else float("inf")

    @property
    def resolution(self) -> float:
        """The smallest excess over the peer's distance that would count, relative to it."""
        return _SIGNIFICANT * self.error / self.peers if self.peers else 0.0

    @property
    def is_farther(self) -> bool:
        """Whether ours is farther from the reference, by more than chance explains."""
        return self.ours - self.peers > _SIGNIFICANT * self.error


def compare(ours: Distance, peers: Distance) -> dict[str, Comparison]:
    """Compare two distances on the same tokens by every metric."""
    count = len(ours.kl)
    if len(peers.kl) != count:
        raise ValueError(f"peers must have {count} tokens; got {len(peers.kl)}")
    resampled = _resampled(count)
    found = {}
    for name, metric in METRICS.items():
        values = [float(metric(d, np.arange(count))) for d in (ours, peers)]
        differences = metric(ours, resampled) - metric(peers, resampled)
        found[name] = Comparison(*values, float(differences.std()))
    return found


def _resampled(count: int) -> np.ndarray[Any, np.dtype[np.intp]]:
    """Return indices (R, N') of tokens, drawn by whole blocks with replacement."""
    blocks = np.arange(count - count % BLOCK).reshape(-1, BLOCK)
    if len(blocks) < _MIN_BLOCKS:
        raise ValueError(f"a comparison needs at least {_MIN_BLOCKS * BLOCK} tokens; got {count}")
    chosen = np.random.default_rng(0).integers(0, len(blocks), (_RESAMPLES, len(blocks)))
    return blocks[chosen].reshape(_RESAMPLES, -1)
