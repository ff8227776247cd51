"""The queue of waiting requests: a heap ordered by `Request.order`."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import NamedTuple

from engine.request import Request

__all__ = ["WaitingQueue"]


class _Entry(NamedTuple):
    order: tuple[int, int]
    serial: int  # push number; tells a requeued request's entry from its stale one
    num_tokens: int
    request: Request


class WaitingQueue:
    """A priority queue of requests; smallest `order` first.

    Push and removal cost O(log n): a removed entry stays in the heap until it reaches the top.

    Attributes
    ----------
    num_tokens : int
        Tokens of all members, counted when they were pushed.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self._heap: list[_Entry] = []
        self._members: dict[tuple[int, int], _Entry] = {}
        self._num_pushed = 0

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Request]:
        """Iterate in service order (sorts, so for statistics and checks only)."""
        return (entry.request for entry in sorted(self._members.values()))

    def __contains__(self, request: Request) -> bool:
        return request.order in self._members and self._members[request.order].request is request

    def push(self, request: Request) -> None:
        """Add `request`; its `order` must be unique among the members."""
        self._num_pushed += 1
        entry = _Entry(request.order, self._num_pushed, request.num_known_tokens, request)
        self._members[request.order] = entry
        self.num_tokens += entry.num_tokens
        heapq.heappush(self._heap, entry)

    def peek(self) -> Request:
        """Return the next request; the queue must not be empty."""
        while self._is_stale(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0].request

    def best_of_first(self, window: int, gain: Callable[[Request], int]) -> Request:
        """Return the request with the largest `gain` among the first `window`; ties: the first.

        If the head has been passed over `window` times, it is next, whatever its gain.
        """
        first: list[_Entry] = []
        while self._heap and len(first) < window:
            entry = heapq.heappop(self._heap)
            if not self._is_stale(entry):
                first.append(entry)
        for entry in first:
            heapq.heappush(self._heap, entry)
        if first[0].request.num_skips >= window:
            return first[0].request
        return max((entry.request for entry in first), key=gain)  # max keeps the first of equals

    def take(self, request: Request) -> None:
        """Remove an admitted request; if it is not the head, the head counts as passed over."""
        first = self.peek()
        if first is not request:
            first.num_skips += 1
        self.discard(request)

    def discard(self, request: Request) -> None:
        """Remove `request` if it is in the queue."""
        entry = self._members.pop(request.order, None)
        if entry is None:
            return
        self.num_tokens -= entry.num_tokens
        if len(self._heap) > 2 * len(self._members) + 64:
            self._heap = list(self._members.values())
            heapq.heapify(self._heap)

    def _is_stale(self, entry: _Entry) -> bool:
        return self._members.get(entry.order) is not entry
