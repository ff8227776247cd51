"""Bisection of a failing step to find the request that makes it fail."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from engine.request import Request
from engine.scheduler.output import ScheduledSequence

__all__ = ["FaultBisection"]


class FaultBisection:
    """Split a step that keeps failing until one request fails alone.

    A step that fails once is recomputed unchanged. Its requests become suspects until they advance
    past the point of failure (`Request.failed_at`). When a step that contains a suspect fails, it
    is split in two: each half runs in steps of its own, and is split again if it fails. So a
    request is declared faulty only after it has failed once with others and once alone. Finding
    it among n requests takes about 2 log2(n) short steps, while the others wait.

    Attributes
    ----------
    num_suspects : int
        Requests that have not yet advanced past the point where their step failed.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> rules = SimpleNamespace(max_tokens=4, min_tokens=0, ignore_eos=False, stop_token_ids=None)
    >>> a, b = (Request(name, [1, 2], rules) for name in "ab")
    >>> one, other = (ScheduledSequence(request, 0, 2, True, 0) for request in (a, b))
    >>> bisection = FaultBisection()
    >>> bisection.record_failure([one, other]), bisection.is_active
    (None, False)
    >>> bisection.record_failure([one, other]), bisection.is_active
    (None, True)
    >>> next(bisection.groups()) == [a], bisection.record_failure([one]) is a
    (True, True)
    >>> bisection.discard(a)
    >>> bisection.record_success([other])
    >>> bisection.is_active, bisection.num_suspects
    (False, 0)
    """

    def __init__(self) -> None:
        self.num_suspects = 0
        self._groups: list[list[Request]] = []  # groups still to be tried, next one last

    @property
    def is_active(self) -> bool:
        """Tell whether any group is still to be tried."""
        return bool(self._groups)

    def groups(self) -> Iterator[list[Request]]:
        """Iterate over the groups still to be tried, next one first; each runs in its own steps."""
        return reversed(self._groups)

    def record_failure(self, sequences: Sequence[ScheduledSequence]) -> Request | None:
        """Record a failed step; return the faulty request if this failure identifies it."""
        unfinished = [s for s in sequences if not s.request.is_finished]
        is_repeated = any(s.request.failed_at for s in unfinished)
        for sequence in unfinished:
            request = sequence.request
            self.num_suspects += not request.failed_at
            request.failed_at = max(request.failed_at, sequence.num_reached_tokens)
        if not is_repeated:
            return None
        requests = [s.request for s in unfinished]
        if len(sequences) == 1:
            return requests[0]
        self._drop(requests)
        middle = (len(requests) + 1) // 2
        self._groups += [half for half in (requests[middle:], requests[:middle]) if half]
        return None

    def record_success(self, sequences: Iterable[ScheduledSequence]) -> None:
        """Clear the suspects that advanced past the point where they failed."""
        cleared = [s.request for s in sequences if 0 < s.request.failed_at <= s.num_reached_tokens]
        self._clear(cleared)

    def discard(self, request: Request) -> None:
        """Drop a finished request."""
        if request.failed_at:
            self._clear([request])

    def _clear(self, requests: Sequence[Request]) -> None:
        for request in requests:
            request.failed_at = 0
        self.num_suspects -= len(requests)
        self._drop(requests)

    def _drop(self, requests: Iterable[Request]) -> None:
        """Remove requests from their groups."""
        if self._groups:
            gone = set(requests)
            groups = ([r for r in group if r not in gone] for group in self._groups)
            self._groups = [group for group in groups if group]
