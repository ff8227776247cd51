"""Eviction order of the prefix tree: least recently used first."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

__all__ = ["LruHeap"]


class _Used(Protocol):
    last_used: int


NodeT = TypeVar("NodeT", bound=_Used)


class LruHeap(Generic[NodeT]):
    """Candidates for eviction, oldest `last_used` first.

    A node is pushed whenever it becomes a candidate, but not removed when it ceases to be one.
    `pop` skips stale entries: the node must pass `is_candidate` and still have the `last_used` it
    was pushed with. Both operations are O(log n), and a node in use costs nothing.

    Parameters
    ----------
    is_candidate : callable
        Tells whether a node may be evicted now.
    """

    def __init__(self, is_candidate: Callable[[NodeT], bool]) -> None:
        self._is_candidate = is_candidate
        self._heap: list[tuple[int, int, NodeT]] = []
        self._num_pushed = 0  # tie-breaker, so that nodes are never compared

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, node: NodeT, num_nodes: int) -> None:
        """Add a candidate; stale entries are purged when they outnumber the tree's `num_nodes`."""
        self._num_pushed += 1
        heapq.heappush(self._heap, (node.last_used, self._num_pushed, node))
        if len(self._heap) > 2 * num_nodes + 64:
            self._clean()

    def pop(self) -> NodeT | None:
        """Remove and return the least recently used candidate; None without candidates."""
        while self._heap:
            last_used, _, node = heapq.heappop(self._heap)
            if node.last_used == last_used and self._is_candidate(node):
                return node
        return None

    def _clean(self) -> None:
        latest = {id(node): (used, serial, node) for used, serial, node in sorted(self._heap)}
        self._heap = [
            entry
            for entry in latest.values()
            if entry[2].last_used == entry[0] and self._is_candidate(entry[2])
        ]
        heapq.heapify(self._heap)
