"""When requests must end: a heap of times."""

from __future__ import annotations

import heapq
import itertools
import time

from engine.output_processor import OutputGroup

__all__ = ["Deadlines"]


class Deadlines:
    """The requests that have a timeout, the most urgent one first."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, OutputGroup]] = []
        self._open: set[OutputGroup] = set()
        self._serial = itertools.count()

    def add(self, group: OutputGroup, deadline: float) -> None:
        """Let `group` end at `deadline`, in seconds on the monotonic clock."""
        heapq.heappush(self._heap, (deadline, next(self._serial), group))
        self._open.add(group)

    def discard(self, group: OutputGroup) -> None:
        """Forget `group`, which has ended."""
        self._open.discard(group)
        if len(self._heap) > 2 * len(self._open) + 64:  # those that ended in time are still there
            self._heap = [entry for entry in self._heap if entry[2] in self._open]
            heapq.heapify(self._heap)

    def pop_overdue(self) -> list[OutputGroup]:
        """Take out the groups whose time is up."""
        overdue: list[OutputGroup] = []
        if not self._heap:
            return overdue
        now = time.monotonic()
        while self._heap and self._heap[0][0] <= now:
            group = heapq.heappop(self._heap)[2]
            if group in self._open:
                self._open.remove(group)
                overdue.append(group)
        return overdue
