"""A watchdog that logs stuck steps, with the engine's state and a stack trace."""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from types import TracebackType

from engine.errors import StepTimeoutError

__all__ = ["Watchdog"]

_LOG = logging.getLogger("engine")


class Watchdog:
    """Times steps: ``with watchdog: ...step...``.

    A step longer than `timeout` is logged once, from a separate thread, with the engine's state
    and the stack of the stepping thread. With `raises`, the step also raises `StepTimeoutError`
    the next time the engine polls (`check`, `remaining`).

    Parameters
    ----------
    timeout : float or None
        Seconds; None disables the watchdog, and no thread is started.
    describe : callable
        Returns the engine's state as text.
    raises : bool
        Whether to abandon a stuck step.
    """

    def __init__(
        self, timeout: float | None, describe: Callable[[], str], *, raises: bool = False
    ) -> None:
        self.timeout = timeout
        self.raises = raises
        self.num_stuck = 0
        self._describe = describe
        self._started: float | None = None
        self._reported: float | None = None
        self._stepping = 0  # thread id
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Watchdog:
        if self.timeout is not None:
            self._stepping = threading.get_ident()
            self._started = time.monotonic()
            if self._thread is None:
                self._thread = _start_thread(self, self.timeout, self._closed)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._started = None

    def check(self) -> None:
        """Raise if the step is stuck and should be abandoned.

        Raises
        ------
        StepTimeoutError
        """
        left = self.remaining()
        if left is not None and left < 0:
            raise StepTimeoutError(f"a step took longer than step_timeout={self.timeout} s")

    def remaining(self) -> float | None:
        """Return the seconds left before the step is abandoned; None means never."""
        if not self.raises or self.timeout is None or self._started is None:
            return None
        return self._started + self.timeout - time.monotonic()

    @property
    def is_stuck(self) -> bool:
        """Whether the current step has exceeded the timeout; safe to read from any thread."""
        started = self._started
        if started is None or self.timeout is None:
            return False
        return time.monotonic() - started > self.timeout

    def close(self) -> None:
        """Stop the watchdog thread."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def look(self) -> None:
        """Report the current step, once, if it is stuck; called by the watchdog thread."""
        started = self._started
        if started is None or started == self._reported or self.timeout is None:
            return
        seconds = time.monotonic() - started
        if seconds > self.timeout:
            self._reported = started
            self.num_stuck += 1
            # Capture stack and state at the same moment; look up source lines afterwards.
            frame = sys._current_frames().get(self._stepping)
            calls = traceback.StackSummary.extract(
                traceback.walk_stack(frame) if frame else (), lookup_lines=False
            )
            try:
                state = self._describe()
            except Exception as error:  # the step has gone on, and changes it meanwhile
                state = f"the engine's state cannot be read: {error}"
            calls.reverse()
            _LOG.error(
                "a step has taken %.1f s (step_timeout is %g s)\n%s\n%s",
                seconds,
                self.timeout,
                state,
                "".join(calls.format()) or "(the thread is gone)",
            )


def _start_thread(dog: Watchdog, timeout: float, closed: threading.Event) -> threading.Thread:
    # A weak reference: the thread must not keep an unclosed engine alive.
    name = "engine-watchdog"
    seen = weakref.ref(dog)
    thread = threading.Thread(target=_watch, args=(seen, timeout / 4, closed), name=name)
    thread.daemon = True
    thread.start()
    return thread


def _watch(seen: weakref.ReferenceType[Watchdog], interval: float, closed: threading.Event) -> None:
    while not closed.wait(interval):
        dog = seen()
        if dog is None:
            return
        dog.look()
        del dog
