"""Child processes of the server: configuration, status reports and shutdown.

The supervisor writes one line of JSON, the `ChildConfig`, to a child's standard input and keeps the
pipe open. When the pipe closes, the supervisor has exited, and the child exits too. A child sends
its reports as lines of JSON on standard output.
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

from engine.distributed.log_stream import drain_stderr, use_bounded_stderr
from engine.errors import EngineError
from engine.text.child_process import kill_descendants

__all__ = ["ChildConfig", "Report", "duration", "end_now", "run_child", "say"]

_MAX_LINE = 1 << 20


@dataclass(frozen=True)
class ChildConfig:
    """Configuration of a child process; plain values only.

    Attributes
    ----------
    model : str
        Model name or path.
    server, engine : dict
        Options of `ServerConfig`, and keyword arguments of `LLMEngine.from_name`.
    addresses : list of str
        Address at which each engine replica listens for API processes.
    token : str
        Secret that API processes send in their first message.
    number : int
        Index of the replica or API process.
    listeners : list of int
        File descriptors of the listening HTTP sockets; empty for an engine process.
    """

    model: str
    server: dict[str, Any]
    engine: dict[str, Any]
    addresses: list[str]
    token: str
    number: int = 0
    listeners: list[int] = field(default_factory=list)

    def line(self) -> bytes:
        """Serialize to the JSON line that the child reads from standard input."""
        return json.dumps(asdict(self)).encode() + b"\n"


class Report:
    """Writes a child's status reports: ready, alive, or failed with a reason."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def ready(self) -> None:
        """Report that the child is serving requests."""
        self._write({"ready": True})

    def alive(self, totals: dict[str, int]) -> None:
        """Report that the child is not hanging, and its counters since its start, by their names.

        The supervisor sums them over all children.
        """
        self._write({"totals": totals})

    def failed(self, reason: str, status: int) -> None:
        """Report why the child fails, and the exit status for the server."""
        self._write({"reason": reason[:4096], "status": status})

    def _write(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the supervisor has exited
            self._file.write(json.dumps(message).encode() + b"\n")
            self._file.flush()


def run_child(main: Callable[[ChildConfig, Report], None]) -> None:
    """Run a child's `main` and exit with 0; on failure, report the reason and exit with 1 or 2.

    SIGQUIT dumps the stacks of all threads.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor sends SIGTERM
    # The supervisor reads our stdout: redirect prints of libraries to stderr.
    report = Report(os.fdopen(os.dup(1), "wb"))
    os.dup2(2, 1)
    use_bounded_stderr()
    if not (line := sys.stdin.buffer.readline(_MAX_LINE)):
        os._exit(1)  # the supervisor has exited
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
    drain_stderr()
    # Not `sys.exit`, which waits for library threads; there is nothing left to save.
    end_now(status)


def say(text: str) -> None:
    """Write a line to standard error; the supervisor has no logger."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"engine: {text}\n")
        sys.stderr.flush()


def duration(seconds: float) -> str:
    """Return a duration in its two largest units.

    Examples
    --------
    >>> duration(7384.2), duration(0.2)
    ('2 h 3 min', '0 s')
    """
    units = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    left = round(seconds)
    parts: list[str] = []
    for name, size in units:
        count, left = divmod(left, size)
        if count or (name == "s" and not parts):
            parts.append(f"{count} {name}")
    return " ".join(parts[:2])


def end_now(status: int) -> None:
    """Exit without cleanup, and kill the processes that this one has started."""
    kill_descendants()
    os._exit(status)


def _end_with_parent() -> None:
    while os.read(0, 4096):
        pass
    end_now(1)
