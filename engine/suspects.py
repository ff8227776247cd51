"""Which request makes steps fail: those of a failing step are tried in ever smaller groups."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from engine.request import Request
from engine.scheduler.output import ScheduledSequence

__all__ = ["Suspects"]


class Suspects:
    """The requests that were in a failing step and have not passed that point since.

    A step that fails once is computed again as it was. If one of its requests is in a failing step
    again, the step is divided: each half is tried in steps of its own, and halved again when it
    fails. So only a request that failed alone, after it had failed before, is to blame; of n
    requests it is found in about 2 log2(n) short steps, while the others wait.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> rules = SimpleNamespace(max_tokens=4, min_tokens=0, ignore_eos=False, stop_token_ids=None)
    >>> a, b = (Request(name, [1, 2], rules) for name in "ab")
    >>> one, other = (ScheduledSequence(request, 0, 2, True, 0) for request in (a, b))
    >>> suspects = Suspects()
    >>> suspects.note_failure([one, other]), suspects.is_trying
    (None, False)
    >>> suspects.note_failure([one, other]), suspects.is_trying
    (None, True)
    >>> next(suspects.groups()) == [a], suspects.note_failure([one]) is a
    (True, True)
    >>> suspects.discard(a)
    >>> suspects.note_success([other])
    >>> suspects.is_trying
    False
    """

    def __init__(self) -> None:
        self._reached: dict[Request, int] = {}  # tokens that the failing step would have made
        self._groups: list[list[Request]] = []  # to be tried, the next one last

    def __len__(self) -> int:
        return len(self._reached)

    @property
    def is_trying(self) -> bool:
        """Tell whether a group waits for its trial."""
        return bool(self._groups)

    def groups(self) -> Iterator[list[Request]]:
        """Iterate over the groups that are to be tried apart from all others, in this order."""
        return reversed(self._groups)

    def note_failure(self, sequences: Sequence[ScheduledSequence]) -> Request | None:
        """Take note of a failing step; return the request to blame, if it is known now."""
        alive = [s.request for s in sequences if not s.request.is_finished]
        is_repeated = any(request in self._reached for request in alive)
        for sequence in sequences:
            request = sequence.request
            if not request.is_finished:
                reached = self._reached.get(request, 0)
                self._reached[request] = max(reached, sequence.context_len)
        if not is_repeated:
            return None
        if len(sequences) == 1:
            return alive[0]
        self._drop(alive)
        middle = (len(alive) + 1) // 2
        self._groups += [half for half in (alive[middle:], alive[:middle]) if half]
        return None

    def note_success(self, sequences: Iterable[ScheduledSequence]) -> None:
        """Take note of a step that came back: who got beyond where it failed is cleared."""
        cleared = [
            s.request
            for s in sequences
            if s.request in self._reached and s.context_len >= self._reached[s.request]
        ]
        for request in cleared:
            del self._reached[request]
        self._drop(cleared)

    def discard(self, request: Request) -> None:
        """Forget a request that ended."""
        if self._reached.pop(request, None) is not None:
            self._drop([request])

    def _drop(self, requests: Iterable[Request]) -> None:
        """Take requests out of their groups."""
        if self._groups:
            gone = set(requests)
            groups = ([r for r in group if r not in gone] for group in self._groups)
            self._groups = [group for group in groups if group]
