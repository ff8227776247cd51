"""Threads that share the pieces of one NumPy computation.

Each thread takes the next piece when it has finished one, and the caller works too: a thread that
is late, because its core is busy, leaves its pieces to the others instead of holding them up. What
a piece computes does not depend on the thread, so results do not depend on their number.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from functools import cache
from queue import SimpleQueue
from typing import Any

from engine import threads

__all__ = ["run"]

Piece = Callable[[], Any]


class _Task:
    """Pieces of work, and how many of them are not finished."""

    __slots__ = ("_finished", "_lock", "_num_left", "_pieces", "error")

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self._pieces = deque(pieces)
        self._num_left = len(self._pieces)
        self._lock = threading.Lock()
        self._finished = threading.Lock()
        self._finished.acquire()
        self.error: BaseException | None = None

    def work(self) -> None:
        """Compute pieces until none is left."""
        while True:
            try:
                piece = self._pieces.popleft()
            except IndexError:
                return
            try:
                piece()
            except BaseException as error:  # raised by `wait`, in the caller's thread
                self.error = error
            with self._lock:
                self._num_left -= 1
                is_last = self._num_left == 0
            if is_last:
                self._finished.release()

    def wait(self) -> None:
        """Wait until every piece is finished; raise the error of one that failed."""
        self._finished.acquire()
        if self.error is not None:
            raise self.error


class _Team:
    """`num_helpers` threads that help with one task at a time."""

    def __init__(self, num_helpers: int) -> None:
        self._queues: list[SimpleQueue[_Task]] = [SimpleQueue() for _ in range(num_helpers)]
        self._in_use = threading.Lock()  # held during a task; other callers work alone
        for number, queue in enumerate(self._queues):
            name = f"engine-cpu-{number}"
            threading.Thread(target=_help, args=(queue,), name=name, daemon=True).start()

    def run(self, pieces: list[Piece]) -> None:
        if not self._queues or not self._in_use.acquire(blocking=False):
            for piece in pieces:
                piece()
            return
        try:
            task = _Task(pieces)
            for queue in self._queues[: len(pieces) - 1]:
                queue.put(task)  # one that wakes up too late finds no piece left
            task.work()
            task.wait()
        finally:
            self._in_use.release()


def _help(queue: SimpleQueue[_Task]) -> None:
    while True:
        queue.get().work()


@cache
def _team(num_threads: int) -> _Team:
    return _Team(num_threads - 1)


def run(pieces: list[Piece]) -> None:
    """Call every piece, in any order, on up to `threads.count()` threads.

    Parameters
    ----------
    pieces : list of callable
        They must not write to the same memory, and should each take some 10 microseconds or more.

    Raises
    ------
    BaseException
        What a piece raised; the others are finished nevertheless.
    """
    if len(pieces) == 1:
        pieces[0]()
    elif pieces:
        _team(threads.count()).run(pieces)


if hasattr(os, "register_at_fork"):  # threads exist in the parent only
    os.register_at_fork(after_in_child=_team.cache_clear)
