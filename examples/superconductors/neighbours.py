"""Nearest known compositions: a baseline, and what the network reads as tokens."""

from __future__ import annotations

from typing import Any

import numpy as np

from .data import Compositions, element_features
from .elements import SYMBOLS

__all__ = ["Neighbours", "exchanged"]

Array = np.ndarray[Any, Any]


class Neighbours:
    """Nearest known compositions, and the mean of their critical temperatures.

    The distance of two compositions is half the sum of the differences of their elements' shares of
    the atoms, of 0.05 log(1 + atoms in the formula) of each element, and of 0.01 of the statistics
    of the elements' properties (`element_features`, with deviation 1 over the known rows). The
    first term counts exchanged atoms; the others tell a cell from half of it, and a chemically
    close substitution from a far one.

    Parameters
    ----------
    known : Compositions
    tc : (N,) array
        Their critical temperatures in K.
    count : int, optional
        Neighbours that are averaged, with weights 1 / (distance + 0.002)**2. By default the number
        of `COUNTS` with the least error when each known row is predicted from the others.
    """

    COUNTS = (1, 2, 3, 5)
    SHORTLIST = 128  # known rows with the most atoms in common, among which the nearest are sought

    def __init__(self, known: Compositions, tc: Array, count: int | None = None) -> None:
        self._shares = np.ascontiguousarray(known.by_element().T)  # (97, N)
        self._tc = np.asarray(tc, np.float32)
        statistics = _statistics(known)
        self._mean = statistics.mean(0)
        self._deviation = np.maximum(statistics.std(0), 1e-6)
        self._traits = self._traits_of(known)
        if count is None:
            most = min(max(self.COUNTS), len(known) - 1)
            rows, distances = self.nearest(known, most, skip=np.arange(len(known)))
            errors = [
                abs(self._average(rows[:, :k], distances[:, :k]) - tc).mean() for k in self.COUNTS
            ]
            count = self.COUNTS[int(np.argmin(errors))]
        self.count = count

    def _traits_of(self, compositions: Compositions) -> Array:
        """Return vectors whose sum of absolute differences is twice the distance."""
        amounts = np.zeros((len(compositions), len(SYMBOLS)), np.float32)
        amounts[np.arange(len(compositions))[:, None], compositions.elements] = compositions.amounts
        amounts[:, 0] = 0
        statistics = (_statistics(compositions) - self._mean) / self._deviation
        terms = [compositions.by_element(), 0.05 * np.log1p(amounts), 0.01 * statistics]
        return np.concatenate(terms, axis=1)

    def nearest(
        self, wanted: Compositions, count: int, skip: Array | None = None
    ) -> tuple[Array, Array]:
        """Return the nearest known rows of each composition and their distances, (M, count).

        skip : (M,) array of int, optional
            A known row that each composition may not have: itself.

        Raises
        ------
        ValueError
            If fewer rows are listed than `count`.
        """
        rows = np.empty((len(wanted), count), np.int64)
        distances = np.empty((len(wanted), count), np.float32)
        if count == 0:
            return rows, distances
        shortlist = min(self.SHORTLIST, len(self._tc))
        if count > (most := shortlist - (skip is not None)):
            raise ValueError(f"count of neighbours must be at most {most}; got {count}")
        traits = self._traits_of(wanted)
        for i, (elements, shares) in enumerate(zip(wanted.elements, wanted.fractions, strict=True)):
            common = np.minimum(self._shares[elements], shares[:, None]).sum(0)
            listed = np.argpartition(-common, shortlist - 1)[:shortlist]
            apart = 0.5 * np.abs(self._traits[listed] - traits[i]).sum(1)
            if skip is not None:
                apart[listed == skip[i]] = np.inf
            order = np.argsort(apart, kind="stable")[:count]
            rows[i] = listed[order]
            distances[i] = apart[order]
        return rows, distances

    def known(
        self, wanted: Compositions, count: int, skip: Array | None = None
    ) -> tuple[Array, Array]:
        """Return temperatures (in K) and distances of the nearest rows. See `nearest`."""
        rows, distances = self.nearest(wanted, count, skip)
        return self._tc[rows], distances

    def predict(self, wanted: Compositions) -> Array:
        """Return critical temperatures in K, (M,) float32."""
        return self._average(*self.nearest(wanted, self.count))

    def _average(self, rows: Array, distances: Array) -> Array:
        weights = 1 / (distances + 2e-3) ** 2
        found: Array = (weights * self._tc[rows]).sum(1) / weights.sum(1)
        return found


def exchanged(a: Compositions, b: Compositions) -> Array:
    """Return the share of the atoms that must be exchanged to make b of a, row by row, (N,)."""
    found: Array = 0.5 * np.abs(a.by_element() - b.by_element()).sum(1)
    return found


def _statistics(compositions: Compositions) -> Array:
    return element_features(compositions)[:, len(SYMBOLS) :]
