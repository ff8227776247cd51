"""The child processes of the server: their start, their reports, their end.

The supervisor writes one line of JSON, the `ChildConfig`, to a child's standard input and keeps it
open: when it closes, the supervisor has ended, and the child ends too. A child reports with lines
of JSON on its standard output.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import IO, Any

from engine.errors import EngineError

__all__ = ["ChildConfig", "Report", "run_child", "say"]

_MAX_LINE = 1 << 20


@dataclass(frozen=True)
class ChildConfig:
    """The configuration of a child process; plain values.

    Attributes
    ----------
    model : str
        Name or path.
    server, engine : dict
        Options of `ServerConfig`, and keywords of `LLMEngine.from_name`.
    addresses : list of str
        The address at which each replica of the engine listens for API processes.
    token : str
        Secret that API processes send in their first message.
    number : int
        Number of the replica, or of the API process.
    listeners : list of int
        Descriptors of the listening sockets for HTTP; empty in the engine's process.
    """

    model: str
    server: dict[str, Any]
    engine: dict[str, Any]
    addresses: list[str]
    token: str
    number: int = 0
    listeners: list[int] = field(default_factory=list)

    def line(self) -> bytes:
        """Return the line of JSON that the child reads from standard input."""
        return json.dumps(asdict(self)).encode() + b"\n"


class Report:
    """Writes a child's reports: ready, alive, or the reason of its end."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def ready(self) -> None:
        """Report that the child serves requests."""
        self._write({"ready": True})

    def alive(self) -> None:
        """Report that the child does not hang."""
        self._write({"alive": True})

    def failed(self, reason: str, status: int) -> None:
        """Report why the child ends, and the exit status for the server."""
        self._write({"reason": reason[:4096], "status": status})

    def _write(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the supervisor has ended
            self._file.write(json.dumps(message).encode() + b"\n")
            self._file.flush()


def run_child(main: Callable[[ChildConfig, Report], None]) -> None:
    """Run a child's `main`; exit with 0, or report the reason and exit with 1 or 2.

    SIGQUIT prints the stacks of its threads.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor sends SIGTERM
    # Libraries may print to stdout, which the supervisor reads: send their output to stderr.
    report = Report(os.fdopen(os.dup(1), "wb"))
    os.dup2(2, 1)
    if not (line := sys.stdin.buffer.readline(_MAX_LINE)):
        os._exit(1)  # the supervisor has ended
    faulthandler.register(signal.SIGQUIT)
    config = ChildConfig(**json.loads(line))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    status = 0
    try:
        main(config, report)
    except EngineError as error:
        status = 2
        report.failed(str(error), status)
    except BaseException as error:
        status = 1
        report.failed(f"{type(error).__name__}: {error}", status)
        sys.excepthook(*sys.exc_info())
    sys.stderr.flush()
    # Not `sys.exit`, which waits for threads of libraries; nothing is left to be saved.
    os._exit(status)


def say(text: str) -> None:
    """Write a line to standard error; a supervisor has no logger."""
    with contextlib.suppress(OSError):
        os.write(2, f"engine: {text}\n".encode())


def _end_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os._exit(1)
