"""Timeouts of requests: a heap of deadlines."""

from __future__ import annotations

import heapq
import itertools
import time

from engine.core.output_processor import OutputGroup

__all__ = ["Deadlines"]


class Deadlines:
    """The requests that have a timeout, earliest deadline first."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, OutputGroup]] = []
        self._num_unfinished = 0
        self._serial = itertools.count()

    def add(self, group: OutputGroup, deadline: float) -> None:
        """Set the deadline of `group`, in seconds on the monotonic clock."""
        group.deadline = deadline
        self._num_unfinished += 1
        heapq.heappush(self._heap, (deadline, next(self._serial), group))

    def discard(self, group: OutputGroup) -> None:
        """Forget `group`, which has finished; it need not have a deadline."""
        if group.deadline is None:
            return
        self._num_unfinished -= 1
        if len(self._heap) > 2 * self._num_unfinished + 64:  # many entries are of finished ones
            self._heap = [entry for entry in self._heap if not entry[2].is_finished]
            heapq.heapify(self._heap)

    def pop_overdue(self) -> list[OutputGroup]:
        """Remove and return the unfinished groups whose deadline has passed."""
        overdue: list[OutputGroup] = []
        if not self._heap:
            return overdue
        now = time.monotonic()
        while self._heap and self._heap[0][0] <= now:
            group = heapq.heappop(self._heap)[2]
            if not group.is_finished:
                overdue.append(group)
        return overdue
