"""Asks the process that compiles grammars first (`check_worker`) whether one can be compiled.

There is one such process for each process that uses `engine`, shared by its threads and started by
the first grammar. A grammar that meets a limit ends it; the next one starts another.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import weakref

from engine.errors import RequestError
from engine.structured.check_worker import MAX_MEMORY, MAX_SECONDS
from engine.text.child_process import ask, end, start

__all__ = ["MAX_WAIT", "CheckProcess", "check"]

MAX_WAIT = 60.0  # seconds until a process that neither answers nor ends is given up

_CODE = (
    "import json, sys; sys.path[:0] = json.loads(sys.argv[1]); "
    "from engine.structured.check_worker import main; main()"
)


class CheckProcess:
    """Starts the process, asks it, and replaces it when it has ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._pid = 0

    def check(self, kind: str, text: str) -> str:
        """Return why a grammar cannot be compiled, or "" if it can.

        Raises
        ------
        RequestError
            If no process can be started.
        """
        request = json.dumps([kind, text]).encode()
        with self._lock:
            answer, code = self._ask(request)
            if code in (-signal.SIGKILL, -signal.SIGTERM):  # maybe before this request
                answer, code = self._ask(request)
        return _cause_of_death(code) if answer is None else answer.decode()

    def _ask(self, request: bytes) -> tuple[bytes | None, int | None]:
        """Return the answer, or None and the exit code of the process; None: it was given up."""
        answer = None
        code = None
        is_late = False
        process = self._running()
        try:
            answer = ask(process, request, MAX_WAIT)
        except TimeoutError:
            is_late = True
        finally:
            if answer is None:  # it died, is late, or this thread was interrupted
                code = self._forget()
        return answer, None if is_late else code

    def forget_lock(self) -> None:
        """Make a new lock, in a process forked from one whose other threads may hold it."""
        self._lock = threading.Lock()

    def _running(self) -> subprocess.Popen[bytes]:
        """Return the child, which is started if there is none (or only that of a parent)."""
        if self._process is not None and self._pid == os.getpid():
            return self._process
        try:
            process = _start()
        except OSError as error:
            raise RequestError(
                f"the process that checks grammars cannot be started ({error})"
            ) from None
        self._process = process
        self._pid = os.getpid()
        self._finish = weakref.finalize(self, end, process)
        return process

    def _forget(self) -> int | None:
        self._process = None
        return self._finish()


def _start() -> subprocess.Popen[bytes]:
    return start(_CODE, {n: os.environ[n] for n in ("LD_LIBRARY_PATH",) if n in os.environ})


def _cause_of_death(code: int | None) -> str:
    if code == -signal.SIGPROF:
        return f"it takes more than {MAX_SECONDS:g} s to compile"
    if code is None:
        return f"it takes more than {MAX_WAIT:g} s to compile"
    return (
        f"it takes more than {MAX_MEMORY >> 20} MiB to compile, or nests too deeply (exit {code})"
    )


_PROCESS = CheckProcess()
check = _PROCESS.check
os.register_at_fork(after_in_child=_PROCESS.forget_lock)
