"""Standard streams of a command: handles closed, full and undecodable ones."""

from __future__ import annotations

import io
import os
import sys
from typing import Any, NoReturn

from engine.errors import EngineError, RequestError

__all__ = ["MAX_INPUT", "discard_errors", "discard_output", "prepare_streams", "read_input"]

MAX_INPUT = 64 << 20
"""Maximum characters read from standard input: far above any context, and /dev/zero is endless."""


class _ClosedInput(io.TextIOBase):
    """Stand-in for a closed standard input: only commands that read it fail."""

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1, /) -> str:
        self._refuse()

    def readline(self, size: int = -1, /) -> str:  # type: ignore[override]
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise RequestError("standard input must be open to be read; it is closed")


def prepare_streams() -> None:
    """Repair the standard streams before the command uses them.

    A closed standard error is redirected to /dev/null, so that a daemon can run without one. On
    standard output, characters that the terminal cannot encode are replaced; standard input is
    decoded strictly.

    Raises
    ------
    EngineError
        If standard output is closed.
    """
    # SAFETY: otherwise the next file opened would get the descriptor of the closed stream, and
    # libraries would print into that file.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    streams: Any = sys  # a closed stream is None
    if streams.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if streams.stdin is None:
        sys.stdin = _ClosedInput()
    elif isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="strict")
    if streams.stdout is None:
        raise EngineError("standard output must be open; it is closed")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def read_input(*, line: bool = False) -> str:
    """Read all of standard input, or its next line ("" at the end).

    Raises
    ------
    RequestError
        If the text is longer than `MAX_INPUT`.
    """
    text = sys.stdin.readline(MAX_INPUT + 1) if line else sys.stdin.read(MAX_INPUT + 1)
    if len(text) > MAX_INPUT:
        what = "a line of standard input" if line else "standard input"
        raise RequestError(f"{what} must have at most {MAX_INPUT} characters")
    return text


def discard_output() -> None:
    """Discard buffered output: its reader has gone, so the final flush would fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def discard_errors() -> None:
    """Discard buffered standard error: if the final flush failed, Python would exit with 120."""
    try:
        sys.stderr.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
