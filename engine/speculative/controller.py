"""How many drafts pay: expected tokens over the measured cost of the step that verifies them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from engine.drafts import Drafts
from engine.request import Request
from engine.speculative.costs import StepCosts

__all__ = ["Controller"]

_PRIOR = 0.6  # assumed probability that a draft is accepted if its parent was, before any was seen
_WEIGHT = 4.0  # how many drafts the assumption counts as
_KEEP_REQUEST, _KEEP_ALL = 0.9, 0.98  # weight of older evidence at each step with drafts
_KEEP_IDLE = 1 - 1 / 256  # and at each step without: what was bad is tried again some day
_GAIN_TO_START = 1.03  # of tokens per second, over plain decoding
_SECOND_BEST = 0.3  # how likely a second branch is accepted, relative to the first


class _Evidence:
    """Accepted and rejected drafts of late."""

    __slots__ = ("accepted", "rejected", "step")

    def __init__(self, step: int) -> None:
        self.accepted = self.rejected = 0.0
        self.step = step

    def fade(self, step: int) -> None:
        """Weaken the evidence by the steps that have passed since it was last seen."""
        keep = _KEEP_IDLE ** (step - self.step)
        self.accepted *= keep
        self.rejected *= keep
        self.step = step

    def add(self, num_accepted: int, num_rejected: int, keep: float) -> None:
        self.accepted = self.accepted * keep + num_accepted
        self.rejected = self.rejected * keep + num_rejected

    def rate(self, prior: float) -> float:
        """Return the probability that the next draft is accepted, if its parent is."""
        seen = self.accepted + self.rejected
        return (self.accepted + _WEIGHT * prior) / (seen + _WEIGHT)


class Controller:
    """Chooses the number of drafts of each request in the next step.

    A draft at distance d from the last known token is expected to be accepted with probability
    p ** d, where p is the request's own rate of late, mixed with that of all requests. Steps that
    are CUDA graphs need the same number of drafts for every sequence.

    Parameters
    ----------
    costs : StepCosts
    graph_lens : sequence of int, optional
        Query tokens per sequence for which there are graphs; None: any number, for each sequence.
    is_adaptive : bool
        False: always as many as there are.

    Examples
    --------
    >>> costs = StepCosts([1], [1, 8], [[1.0, 1.4]])
    >>> controller = Controller(costs, None)
    >>> request = object()
    >>> controller.choose([(request, Drafts(tuple(range(7))))], num_decodes=1)
    {...: 4}
    """

    def __init__(
        self, costs: StepCosts, graph_lens: Sequence[int] | None, *, is_adaptive: bool = True
    ) -> None:
        self._costs = costs
        self._lens = None if graph_lens is None else sorted(n for n in graph_lens if n > 1)
        self._is_adaptive = is_adaptive
        self._is_on = True
        self._step = 0
        self._of_all = _Evidence(0)
        self._of: dict[Request, _Evidence] = {}

    @property
    def needs_equal_lengths(self) -> bool:
        """Tell whether all sequences of a step with drafts should have the same number."""
        return self._lens is not None

    def next_step(self) -> None:
        """Note that another step begins."""
        self._step += 1

    def forget(self, request: Request) -> None:
        """Drop the evidence of a request."""
        self._of.pop(request, None)

    def record(self, request: Request, num_accepted: int, num_drafted: int) -> None:
        """Note how many of the drafts along the accepted path there were, and were accepted."""
        rejected = int(num_accepted < num_drafted)
        own = self._of.setdefault(request, _Evidence(self._step))
        own.fade(self._step)
        own.add(num_accepted, rejected, _KEEP_REQUEST)
        self._of_all.fade(self._step)
        self._of_all.add(num_accepted, rejected, _KEEP_ALL)

    def num_worth_asking(
        self, requests: Sequence[Request], most: int, proposing: Sequence[float]
    ) -> int:
        """Return for how many drafts to ask a proposer that takes time; 0: for none.

        Parameters
        ----------
        requests : sequence of Request
        most : int
            Maximum number of drafts.
        proposing : sequence of float
            Seconds that it takes to propose 1, 2, ... `most` drafts for all of them.
        """
        if not self._is_adaptive:
            return most
        rates = np.array([self._rate(request) for request in requests])
        counts = range(1, most + 1) if self._lens is None else [n - 1 for n in self._lens]
        plain = self._costs.seconds(len(rates), 1)
        gains = {
            count: self._gain(plain, float((rates[:, None] ** np.arange(1, count + 1)).sum()),
                              len(rates), count, proposing[count - 1])
            for count in counts if count <= most
        }  # fmt: skip
        return self._best(gains)

    def choose(
        self, proposals: Sequence[tuple[Request, Drafts]], num_decodes: int
    ) -> Mapping[Request, int]:
        """Return how many drafts of each proposal to verify; empty: none.

        Parameters
        ----------
        proposals : sequence of (Request, Drafts)
        num_decodes : int
            Sequences that are decoded in the step, with drafts or without.
        """
        if not proposals:
            return {}
        if not self._is_adaptive:
            return {request: len(drafts) for request, drafts in proposals}
        expected = [_expected(drafts, self._rate(request)) for request, drafts in proposals]
        if self._lens is None:
            return self._choose_each(proposals, expected, num_decodes)
        plain = self._costs.seconds(num_decodes, 1)
        gains = {
            n - 1: self._gain(plain, sum(e[: n - 1].sum() for e in expected), num_decodes, n - 1)
            for n in self._lens
        }
        best = self._best(gains)
        return {request: min(best, len(drafts)) for request, drafts in proposals} if best else {}

    def graph_len(self, most: int) -> int:
        """Return for how many drafts of every sequence there is a graph: at least `most`."""
        return next((n - 1 for n in self._lens or () if n > most), most)

    def _choose_each(
        self,
        proposals: Sequence[tuple[Request, Drafts]],
        expected: Sequence[np.ndarray],
        num_decodes: int,
    ) -> Mapping[Request, int]:
        """Take the drafts that are expected to give most, as long as the step gains by them."""
        owners = np.repeat(np.arange(len(expected)), [len(e) for e in expected])
        values = np.concatenate(expected)
        order = np.argsort(-values, kind="stable")  # a request's values fall: a prefix is taken
        tokens = num_decodes + np.cumsum(values[order])
        seconds = [
            self._costs.seconds(num_decodes, 1 + (i + 1) / num_decodes) for i in range(len(order))
        ]
        rates = tokens / seconds
        best = int(rates.argmax())
        plain = num_decodes / self._costs.seconds(num_decodes, 1)
        if not self._pays(float(rates[best]) / plain):
            return {}
        counts = np.bincount(owners[order[: best + 1]], minlength=len(expected)).tolist()
        return {r: count for (r, _), count in zip(proposals, counts, strict=True) if count}

    def _gain(
        self, plain: float, accepted: float, num_decodes: int, count: int, proposing: float = 0.0
    ) -> float:
        """Return the tokens per second with `count` drafts of each, relative to none."""
        seconds = self._costs.seconds(num_decodes, 1 + count) + proposing
        return (num_decodes + accepted) / num_decodes * plain / seconds

    def _best(self, gains: Mapping[int, float]) -> int:
        best = max(gains, key=lambda count: gains[count], default=0)
        return best if self._pays(gains.get(best, 0.0)) else 0

    def _pays(self, gain: float) -> bool:
        """Tell whether a gain suffices; to start takes more than to go on."""
        self._is_on = gain > (1.0 if self._is_on else _GAIN_TO_START)
        return self._is_on

    def _rate(self, request: Request) -> float:
        self._of_all.fade(self._step)
        prior = self._of_all.rate(_PRIOR)
        own = self._of.get(request)
        if own is None:
            return prior
        own.fade(self._step)
        return own.rate(prior)


def _expected(drafts: Drafts, rate: float) -> np.ndarray:
    """Return the probability that each draft is accepted; it does not rise along the list."""
    depths = np.array(drafts.depths, np.float64)
    values = rate**depths
    if drafts.is_tree:
        seen: set[int] = set()
        for index, parent in enumerate(drafts.parents or ()):
            values[index] *= _SECOND_BEST if parent in seen else 1.0
            seen.add(parent)
    return np.minimum.accumulate(values)
