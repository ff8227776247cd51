"""Standard input, output and error of a command: closed, full, or not decodable."""

from __future__ import annotations

import io
import os
import sys
from typing import Any, NoReturn

from engine.errors import EngineError, RequestError

__all__ = ["MAX_INPUT", "discard_errors", "discard_output", "prepare_streams", "read_input"]

MAX_INPUT = 64 << 20
"""Characters of standard input: far beyond every context. /dev/zero has no end."""


class _ClosedInput(io.TextIOBase):
    """Stands for a closed standard input: only a command that reads it fails."""

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1, /) -> str:
        self._refuse()

    def readline(self, size: int = -1, /) -> str:  # type: ignore[override]
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise RequestError("standard input must be open to be read; it is closed")


def prepare_streams() -> None:
    """Make the standard streams usable, as a command expects them.

    A closed standard error is discarded, so that a daemon runs without one. Standard output
    replaces what the terminal cannot encode; standard input must be decodable.

    Raises
    ------
    EngineError
        If standard output is closed.
    """
    # SAFETY: otherwise the next file that is opened gets the number of a closed stream, and what
    # libraries print would be written into it.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    streams: Any = sys  # any of the three is None if it was closed
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
    """Return what standard input has, or its next line ("" at the end).

    Raises
    ------
    RequestError
        If that is longer than `MAX_INPUT`.
    """
    text = sys.stdin.readline(MAX_INPUT + 1) if line else sys.stdin.read(MAX_INPUT + 1)
    if len(text) > MAX_INPUT:
        what = "a line of standard input" if line else "standard input"
        raise RequestError(f"{what} must have at most {MAX_INPUT} characters")
    return text


def discard_output() -> None:
    """Discard what standard output still holds: nobody can read it, and the last flush fails."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def discard_errors() -> None:
    """Discard what a full standard error still holds, for which Python would exit with 120."""
    try:
        sys.stderr.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
