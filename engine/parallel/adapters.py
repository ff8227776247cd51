"""LoRA adapters in several processes: each reads its part of the files while steps go on.

The driver reads an adapter first, so the others read files that are valid. They read in a thread,
and answer once they hold their part; only then a request may use the adapter. A step that needs it
in a slot copies it there, from memory.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine.distributed.messages import from_text, to_text
from engine.errors import WeightsError
from engine.loading.lora import LoraAdapter
from engine.model import Model

__all__ = ["HeldAdapters", "SharedAdapters"]

_READ, _WRITE, _DROP = range(3)  # first number of a message


class SharedAdapters:
    """Lets the workers hold the adapters that the driver holds, under the same serials.

    Parameters
    ----------
    post : callable
        ``post(numbers, arrays)`` sends a message for `HeldAdapters.follow` to every worker; called
        from any thread.
    answers : callable
        ``answers(serial)`` waits for the answer of every worker about this adapter, and returns an
        error by the name of each that could not read it.
    """

    def __init__(
        self,
        post: Callable[[Sequence[int], Sequence[Any]], None],
        answers: Callable[[int], Mapping[str, str]],
    ) -> None:
        self._post = post
        self._answers = answers
        self._sharing = threading.Lock()
        self._dropped: deque[int] = deque()  # serials of adapters that are gone here

    def share(self, adapter: LoraAdapter) -> None:
        """Have every worker read its part of an adapter, and wait for them; from any thread.

        Raises
        ------
        WeightsError
            If one cannot read it; the message names the worker.
        RankError
            If one has failed.
        """
        # A finalizer may run in the middle of any call, so it sends nothing itself.
        weakref.finalize(adapter, self._dropped.append, adapter.serial).atexit = False
        names = adapter.name, os.path.abspath(adapter.path)
        with self._sharing:
            self._post([_READ, adapter.serial], [to_text(name) for name in names])
            errors = self._answers(adapter.serial)
        for who, error in errors.items():
            raise WeightsError(f"{error} ({who})")

    def write(self, adapter: LoraAdapter, slot: int) -> None:
        """Have every worker copy its part of an adapter to a slot, before the next step."""
        self._post([_WRITE, slot, adapter.serial], [])

    def free_dropped(self) -> None:
        """Let the workers forget the adapters that were garbage-collected here."""
        if self._dropped:
            count = len(self._dropped)
            self._post([_DROP, *(self._dropped.popleft() for _ in range(count))], [])


class HeldAdapters:
    """A worker's part of each adapter; they are read one after another, in a thread.

    Parameters
    ----------
    model : Model
    answer : callable
        ``answer(serial, error)`` tells the driver that an adapter was read, or why not; called from
        the thread.
    """

    def __init__(self, model: Model, answer: Callable[[int, str], None]) -> None:
        self._model = model
        self._answer = answer
        self._held: dict[int, LoraAdapter] = {}  # the driver's serial -> adapter
        self._tasks: queue.SimpleQueue[tuple[list[int], list[str]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def follow(self, numbers: list[int], arrays: list[Any]) -> None:
        """Execute a message of `SharedAdapters`."""
        kind, *rest = numbers
        if kind == _WRITE:
            slot, serial = rest
            self._model.write_adapter(self._held[serial], slot)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        # An adapter may be dropped before it is read, if the driver was interrupted: in order.
        self._tasks.put((rest, list(map(from_text, arrays))))

    def close(self) -> None:
        """End the thread."""
        self._tasks.put(None)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            serials, names = task
            if names:
                with contextlib.suppress(OSError):  # the driver has ended
                    self._answer(serials[0], self._error_of_read(serials[0], *names))
            else:
                for serial in serials:
                    self._held.pop(serial, None)

    def _error_of_read(self, serial: int, name: str, path: str) -> str:
        """Read an adapter and hold it; return "", or why it cannot be read."""
        try:
            self._held[serial] = self._model.read_adapter(name, path)
        except Exception as error:
            return str(error) or type(error).__name__
        return ""
