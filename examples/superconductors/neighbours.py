"""Nearest known compositions: a baseline, and what the network reads as tokens."""

from __future__ import annotations

from typing import Any

import numpy as np

from .data import Compositions

__all__ = ["Neighbours"]

Array = np.ndarray[Any, Any]


class Neighbours:
    """Nearest known compositions, and the mean of their critical temperatures.

    The distance of two compositions is the share of the atoms that would have to be exchanged, 0 to
    1: half the sum of the differences of the elements' fractions.

    Parameters
    ----------
    known : Compositions
    tc : (N,) array
        Their critical temperatures in K.
    count : int, optional
        Neighbours that are averaged, with weights 1 / (distance + 0.0005)**2. By default the number
        of `COUNTS` with the least error when each known row is predicted from the others.
    """

    COUNTS = (1, 2, 3, 5)

    def __init__(self, known: Compositions, tc: Array, count: int | None = None) -> None:
        self._shares = np.ascontiguousarray(known.by_element().T)  # (97, N)
        self._tc = np.asarray(tc, np.float32)
        if count is None:
            rows, distances = self.nearest(known, max(self.COUNTS), skip=np.arange(len(known)))
            errors = [
                abs(self._mean(rows[:, :k], distances[:, :k]) - tc).mean() for k in self.COUNTS
            ]
            count = self.COUNTS[int(np.argmin(errors))]
        self.count = count

    def nearest(
        self, wanted: Compositions, count: int, skip: Array | None = None
    ) -> tuple[Array, Array]:
        """Return the nearest known rows of each composition and their distances, (M, count).

        skip : (M,) array of int, optional
            A known row that each composition may not have: itself.
        """
        rows = np.empty((len(wanted), count), np.int64)
        distances = np.empty((len(wanted), count), np.float32)
        if count == 0:
            return rows, distances
        fractions = wanted.fractions
        for i, (elements, shares) in enumerate(zip(wanted.elements, fractions, strict=True)):
            # Fractions sum to 1, so half the sum of |a - b| is 1 less the sum of min(a, b).
            common = np.minimum(self._shares[elements], shares[:, None]).sum(0)
            if skip is not None:
                common[skip[i]] = -1
            best = np.argpartition(-common, count - 1)[:count]
            rows[i] = best[np.argsort(-common[best], kind="stable")]
            distances[i] = 1 - common[rows[i]]
        return rows, np.maximum(distances, 0)

    def known(
        self, wanted: Compositions, count: int, skip: Array | None = None
    ) -> tuple[Array, Array]:
        """Return temperatures (in K) and distances of the nearest rows. See `nearest`."""
        rows, distances = self.nearest(wanted, count, skip)
        return self._tc[rows], distances

    def predict(self, wanted: Compositions) -> Array:
        """Return critical temperatures in K, (M,) float32."""
        return self._mean(*self.nearest(wanted, self.count))

    def _mean(self, rows: Array, distances: Array) -> Array:
        weights = 1 / (distances + 5e-4) ** 2
        found: Array = (weights * self._tc[rows]).sum(1) / weights.sum(1)
        return found
