"""`LogStream`: standard error through a bounded queue, so that a full pipe stops no process."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator

__all__ = ["LogStream", "bounded_stderr", "drain_stderr", "use_bounded_stderr"]

MAX_CHARS = 1 << 20  # maximum characters waiting to be written
_EXIT_SECONDS = 1.0  # time to write them when the process ends
_WRITE_CHARS = 1 << 16  # characters per system call
_RETRY_SECONDS = 0.01  # pause before the next call if the descriptor is full and does not block

_log = logging.getLogger("engine.server")


class LogStream(io.TextIOBase):
    """Text stream whose `write` never blocks: a thread writes, and lines beyond a limit are lost.

    Once there is room again, the log says how many were lost.

    Parameters
    ----------
    descriptor : int
        File descriptor to write to.
    max_chars : int
        Maximum characters waiting to be written.

    Attributes
    ----------
    num_lost : int
        Lines that were lost and not reported yet.
    """

    def __init__(self, descriptor: int, max_chars: int = MAX_CHARS) -> None:
        self.num_lost = 0
        self._descriptor = descriptor
        self._max_chars = max_chars
        self._tail = ""  # the start of a line
        self._waiting: deque[str] = deque()
        self._num_chars = 0  # characters in `_waiting` and being written
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="log", daemon=True).start()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Encoding of the bytes written."""
        return "utf-8"

    def fileno(self) -> int:
        """Return the file descriptor."""
        return self._descriptor

    def isatty(self) -> bool:
        """Tell whether the descriptor is a terminal."""
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, text: str) -> int:
        """Queue the text's complete lines, or lose them if the queue is full."""
        with self._changed:
            self._tail += text
            if "\n" in text or len(self._tail) > _WRITE_CHARS:
                lines, newline, self._tail = self._tail.rpartition("\n")
                if not newline:
                    lines = self._tail
                    self._tail = ""
                self._queue(lines + newline)
        return len(text)

    def flush(self) -> None:
        """Queue the start of a line; does not wait for anything to be written."""
        with self._changed:
            self._queue(self._tail)
            self._tail = ""

    def drain(self, seconds: float = _EXIT_SECONDS) -> bool:
        """Wait up to `seconds` until all is written; return whether it is."""
        self.flush()
        deadline = time.monotonic() + seconds
        with self._changed:
            while self._num_chars and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            return not self._num_chars

    def _queue(self, text: str) -> None:
        if not text:
            return
        if self._num_chars + len(text) > self._max_chars:
            self.num_lost += max(1, text.count("\n"))
            return
        self._waiting.append(text)
        self._num_chars += len(text)
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    self._changed.wait()
                text = self._waiting.popleft()
                while self._waiting and len(text) + len(self._waiting[0]) <= _WRITE_CHARS:
                    text += self._waiting.popleft()
            with contextlib.suppress(OSError):  # nobody can read it any more
                self._write_all(text.encode("utf-8", "backslashreplace"))
            with self._changed:
                self._num_chars -= len(text)
                num_lost = self.num_lost
                self.num_lost = 0
                self._changed.notify_all()
            if num_lost:
                _log.warning("%d lines of the log were lost: nothing has read them", num_lost)

    def _write_all(self, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:  # full, and another process with this file chose not to block
                time.sleep(_RETRY_SECONDS)


def use_bounded_stderr() -> None:
    """Replace `sys.stderr` and `sys.stdout` of this process by a `LogStream` to descriptor 2."""
    sys.stderr = sys.stdout = LogStream(2)


def drain_stderr() -> None:
    """Write what waits to be written, for at most a second if nothing reads it."""
    if isinstance(sys.stderr, LogStream):
        sys.stderr.drain()
    else:
        sys.stderr.flush()


@contextlib.contextmanager
def bounded_stderr() -> Iterator[None]:
    """Let `sys.stderr` be a `LogStream` within the context, and drain it in the end."""
    before = sys.stderr
    sys.stderr = stream = LogStream(2)
    try:
        yield
    finally:
        stream.drain()
        sys.stderr = before
