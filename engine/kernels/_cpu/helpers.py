"""Threads that share the tasks of a C library with their caller."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from engine import threads

__all__ = ["Helpers"]


class Helpers:
    """Helper threads of a C library, started when they are first wanted.

    A helper calls `help`, which computes outside the interpreter's lock until there has been no
    task for a while; then it sleeps until it is woken up.

    Parameters
    ----------
    help, reset : callable
        The library's functions: `help` takes parts of tasks, `reset` forgets a task whose helpers
        a fork has left behind.
    """

    def __init__(self, help: Callable[[], None], reset: Callable[[], None]) -> None:
        self._help = help
        self._reset = reset
        self._forget()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._in_use = threading.Lock()  # held during a task
        self._awake: list[threading.Event] = []
        self._reset()

    @contextmanager
    def at_work(self, num_parts: int) -> Iterator[int]:
        """Wake up helpers for a task of `num_parts` parts, and yield the number of threads.

        It is 1 while another caller has the helpers.
        """
        number = min(threads.count(), num_parts)
        if number <= 1 or not self._in_use.acquire(blocking=False):
            yield 1
            return
        try:
            self._wake(number - 1)
            yield number
        finally:
            self._in_use.release()

    def _wake(self, number: int) -> None:
        with suppress(RuntimeError):  # no more threads: the others do its work
            while len(self._awake) < number:
                self._start()
        for awake in self._awake[:number]:
            if not awake.is_set():
                awake.set()

    def _start(self) -> None:
        awake = threading.Event()
        name = f"engine-cpu-helper-{len(self._awake)}"
        threading.Thread(target=self._run, args=(awake,), name=name, daemon=True).start()
        self._awake.append(awake)

    def _run(self, awake: threading.Event) -> None:
        while True:
            awake.wait()
            self._help()
            awake.clear()  # a task that has just come is left to the others
