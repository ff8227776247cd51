"""Chooses how many drafts to verify: the number with the most expected tokens per second."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from engine.drafts import MAX_QUERY_LEN, Drafts
from engine.request import Request
from engine.speculative.costs import StepCosts

__all__ = ["Controller"]

Array = np.ndarray[Any, np.dtype[np.float64]]

_PRIOR = 0.6  # assumed acceptance probability of a draft whose parent was accepted
_WEIGHT = 4.0  # weight of the prior, as an equivalent number of drafts
# Decay factors of older evidence, per step with drafts.
_KEEP_REQUEST = 0.9
_KEEP_ALL = 0.98
_KEEP_IDLE = 1 - 1 / 256  # decay factor per step without drafts: drafting is retried eventually
_GAIN_TO_START = 1.03  # minimum speedup over plain decoding to start drafting
_NEW_SECONDS = 0.1  # weight of the latest measurement in the moving average
_SECOND_BEST = 0.3  # acceptance rate of a second branch, relative to the first


class _Evidence:
    """Exponentially decaying counts of accepted and rejected drafts."""

    __slots__ = ("accepted", "rejected", "step")

    def __init__(self, step: int) -> None:
        self.accepted = self.rejected = 0.0
        self.step = step

    def fade(self, step: int) -> None:
        """Decay the counts for the steps since the last call."""
        if step == self.step:
            return
        keep = _KEEP_IDLE ** (step - self.step)
        self.accepted *= keep
        self.rejected *= keep
        self.step = step

    def add(self, num_accepted: int, num_rejected: int, keep: float) -> None:
        self.accepted = self.accepted * keep + num_accepted
        self.rejected = self.rejected * keep + num_rejected

    def rate(self, prior: float) -> float:
        """Estimate the acceptance probability of a draft whose parent was accepted."""
        seen = self.accepted + self.rejected
        return (self.accepted + _WEIGHT * prior) / (seen + _WEIGHT)


class Controller:
    """Chooses how many drafts of each request the next step verifies.

    A draft at distance d from the last known token is expected to be accepted with probability
    p ** d, where p is the request's recent acceptance rate, blended with the rate over all
    requests. With CUDA graphs, every sequence of a step needs the same number of drafts.

    Parameters
    ----------
    costs : StepCosts
        Measured seconds of a step.
    graph_lens : sequence of int or None
        Query lengths for which graphs were captured; None: any number of drafts per sequence.
    is_adaptive : bool
        False: verify every proposed draft.

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
        # Host time per step with drafts, in seconds. Steps without drafts overlap and hide it.
        self._host_seconds = 0.0
        self._of_all = _Evidence(0)
        self._of: dict[Request, _Evidence] = {}

    @property
    def needs_equal_lengths(self) -> bool:
        """Tell whether all sequences of a step need the same number of drafts."""
        return self._lens is not None

    def next_step(self) -> None:
        """Advance the step counter."""
        self._step += 1

    def note_host_seconds(self, seconds: float) -> None:
        """Record the time the device waited for the host to prepare a step with drafts."""
        known = self._host_seconds
        # Capped, because a pause such as a garbage collection is not typical.
        self._host_seconds += _NEW_SECONDS * (min(seconds, 2 * known) - known) if known else seconds

    def forget(self, request: Request) -> None:
        """Drop the evidence of a request."""
        self._of.pop(request, None)

    def record(self, request: Request, num_accepted: int, num_drafted: int) -> None:
        """Record one verification: drafts along the accepted path, accepted or not."""
        rejected = int(num_accepted < num_drafted)
        own = self._of.setdefault(request, _Evidence(self._step))
        own.fade(self._step)
        own.add(num_accepted, rejected, _KEEP_REQUEST)
        self._of_all.fade(self._step)
        self._of_all.add(num_accepted, rejected, _KEEP_ALL)

    def num_worth_asking(
        self,
        requests: Sequence[Request],
        most: int,
        num_decodes: int,
        proposing: Callable[[int], float],
    ) -> int:
        """Return the number of drafts to request from a proposer whose calls take time; may be 0.

        Parameters
        ----------
        requests : sequence of Request
            Requests that accept drafts.
        most : int
            Maximum number of drafts per request.
        num_decodes : int
            Sequences that decode in the step, with or without drafts.
        proposing : callable
            Maps a number of drafts per request to the proposer's time in seconds.
        """
        if not self._is_adaptive or not requests:
            return most if requests else 0
        prior = self._prior()
        rates = np.array([self._rate(request, prior) for request in requests])
        if self._lens is None:
            lens = {count: count + 1 for count in range(1, most + 1)}
        else:
            lens = {min(n - 1, most): n for n in reversed(self._lens)}
        tokens = np.cumsum((rates[:, None] ** np.arange(1, most + 1)).sum(axis=0))
        plain = self._costs.seconds(num_decodes, 1)
        gains = {
            count: (1 + tokens[count - 1] / num_decodes)
            * plain
            / (self._costs.seconds(num_decodes, length) + proposing(count))
            for count, length in lens.items()
        }
        best = max(gains, key=lambda count: gains[count])
        return best if self._pays(gains[best]) else 0

    def choose(
        self,
        proposals: Sequence[tuple[Request, Drafts]],
        num_decodes: int,
        *,
        certain: Collection[Request] = (),
        room: int = MAX_QUERY_LEN,
    ) -> Mapping[Request, int]:
        """Return how many drafts of each proposal to verify; empty if drafting does not pay.

        Parameters
        ----------
        proposals : sequence of (Request, Drafts)
            Requests and their drafts.
        num_decodes : int
            Sequences that decode in the step, with or without drafts.
        certain : collection of Request, optional
            Requests whose drafts cannot be rejected.
        room : int
            Maximum number of drafts per sequence if all sequences need the same number.
        """
        if not proposals:
            return {}
        lens = None if self._lens is None else [n for n in self._lens if n <= 1 + room]
        if lens is not None and not lens:
            return {}
        if not self._is_adaptive:
            longest = MAX_QUERY_LEN if lens is None else lens[-1] - 1
            return {request: min(len(drafts), longest) for request, drafts in proposals}
        gain, counts = self._best(proposals, certain, num_decodes, lens)
        if not self._pays(gain):
            return {}
        pairs = zip(proposals, counts, strict=True)
        return {request: count for (request, _), count in pairs if count}

    def would_pay(
        self,
        proposals: Sequence[tuple[Request, Drafts]],
        num_seen: int,
        num_decodes: int,
        *,
        certain: Collection[Request] = (),
    ) -> bool:
        """Tell whether drafts would pay, taking `num_seen` of the sequences as typical of all."""
        if not proposals or not self._is_adaptive:
            return bool(proposals)
        times = -(-num_decodes // num_seen)
        some = list(proposals) * times
        return self._best(some, certain, num_decodes, self._lens)[0] > self._least_gain

    def graph_len(self, most: int) -> int:
        """Return the number of drafts in the smallest graph that holds `most`, else `most`."""
        fitting = [n - 1 for n in self._lens or () if n > most]
        return fitting[0] if fitting else most

    def _best(
        self,
        proposals: Sequence[tuple[Request, Drafts]],
        certain: Collection[Request],
        num_decodes: int,
        lens: Sequence[int] | None,
    ) -> tuple[float, list[int]]:
        """Return the largest gain over plain decoding, and each sequence's number of drafts."""
        prior = self._prior()
        pairs = [(d, 1.0 if r in certain else self._rate(r, prior)) for r, d in proposals]
        if lens is None:
            return self._best_of_any([_acceptance(*pair) for pair in pairs], num_decodes)
        plain, *seconds = self._costs.all_of(num_decodes, (1, *lens))
        gain = 0.0
        most = 0
        for length, time in zip(lens, seconds, strict=True):
            accepted = sum([_num_accepted(drafts, rate, length - 1) for drafts, rate in pairs])
            new_gain = (1 + accepted / num_decodes) * (plain / (time + self._host_seconds))
            if new_gain > gain:
                gain = new_gain
                most = length - 1
        return gain, [min(most, len(drafts)) for drafts, _ in pairs]

    def _best_of_any(self, expected: Sequence[Array], num_decodes: int) -> tuple[float, list[int]]:
        """Return the result of `_best` if sequences may have different numbers of drafts.

        `expected`: acceptance probability of each draft, by sequence.
        """
        plain = self._costs.seconds(num_decodes, 1)
        # Take drafts in descending order of expected tokens, as long as the gain grows.
        owners = np.repeat(np.arange(len(expected)), [len(e) for e in expected])
        values = np.concatenate(expected)
        # A request's values are non-increasing, so the drafts taken are a prefix of its list.
        order = np.argsort(-values, kind="stable")
        tokens = np.cumsum(values[order])
        query_lens = 1 + np.arange(1, len(order) + 1) / num_decodes
        seconds = self._costs.all_seconds(num_decodes, query_lens)
        gains = (1 + tokens / num_decodes) * plain / seconds
        best = int(gains.argmax())
        counts = np.bincount(owners[order[: best + 1]], minlength=len(expected))
        return float(gains[best]), counts.tolist()

    @property
    def _least_gain(self) -> float:
        """Minimum gain for verifying drafts; higher to start than to continue."""
        return 1.0 if self._is_on else _GAIN_TO_START

    def _pays(self, gain: float) -> bool:
        self._is_on = gain > self._least_gain
        return self._is_on

    def _prior(self) -> float:
        """Return the acceptance rate of all requests."""
        self._of_all.fade(self._step)
        return self._of_all.rate(_PRIOR)

    def _rate(self, request: Request, prior: float) -> float:
        own = self._of.get(request)
        if own is None:
            return prior
        own.fade(self._step)
        return own.rate(prior)


def _num_accepted(drafts: Drafts, rate: float, most: int) -> float:
    """Return the expected number of accepted drafts among the first `most`."""
    if drafts.parents is not None and drafts.is_tree:
        return float(_acceptance(drafts, rate)[:most].sum())
    count = min(most, len(drafts))
    return count if rate == 1.0 else rate * (1 - rate**count) / (1 - rate)


def _acceptance(drafts: Drafts, rate: float) -> Array:
    """Return the acceptance probability of each draft, non-increasing along the list."""
    depths = np.array(drafts.depths, np.float64)
    values = rate**depths
    if drafts.is_tree:
        seen: set[int] = set()
        for index, parent in enumerate(drafts.parents or ()):
            values[index] *= _SECOND_BEST if parent in seen else 1.0
            seen.add(parent)
    return np.minimum.accumulate(values)
