"""The queue of requests that wait: ordered by `Request.order`, cheap whatever its length."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from engine.request import Request

__all__ = ["WaitingQueue"]


class WaitingQueue:
    """A priority queue of requests; smallest `order` first.

    Push and pop cost O(log n); a removal from the middle is noted and done when it comes up.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Request]] = []
        self._members: dict[tuple[int, int], Request] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Request]:
        """Iterate in the order of service (sorts: for statistics and checks only)."""
        return (self._members[order] for order in sorted(self._members))

    def __contains__(self, request: Request) -> bool:
        return self._members.get(request.order) is request

    def push(self, request: Request) -> None:
        """Add `request`, whose `order` no other member has."""
        self._members[request.order] = request
        heapq.heappush(self._heap, (request.order, request))

    def peek(self) -> Request:
        """Return the next request (the queue must not be empty)."""
        while self._heap[0][0] not in self._members:
            heapq.heappop(self._heap)
        return self._heap[0][1]

    def pop(self) -> Request:
        """Remove and return the next request (the queue must not be empty)."""
        request = self.peek()
        heapq.heappop(self._heap)
        del self._members[request.order]
        return request

    def discard(self, request: Request) -> None:
        """Remove `request`, wherever it stands; nothing if it is not there."""
        if self._members.pop(request.order, None) is None:
            return
        if len(self._heap) > 2 * len(self._members) + 64:
            self._heap = [(order, r) for order, r in self._members.items()]
            heapq.heapify(self._heap)
