"""Asks the process that runs chat templates (`template_worker`) for texts.

There is one such process for each process that uses `engine`, shared by its threads. It is started
when it is first needed, or earlier by `LLM`, as its imports take about 0.1 s. If a template meets a
limit, its process ends and its request fails; the next request starts another process.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from engine.errors import RequestError, TemplateError
from engine.model_files import excerpt
from engine.text.template_worker import LENGTH_BYTES, MAX_CHARS, MAX_MEMORY, pack

__all__ = ["TemplateProcess", "ask", "close", "start", "worker_pid"]

MAX_SECONDS = 2.0  # of CPU time for one request, which does not depend on the machine's load
MAX_WAIT = 60.0  # seconds until a process that neither answers nor ends is given up
MAX_REQUEST_BYTES = 64 << 20
_MAX_ANSWER_BYTES = 6 * MAX_CHARS + 4096  # JSON has up to 6 bytes for a character
_LEFT_SECONDS = 5.0  # to end after the end of the requests

_CODE = (
    "import sys; sys.path[:] = sys.argv[1:]\nfrom engine.text.template_worker import main; main()"
)
_KEPT_VARIABLES = ("LD_LIBRARY_PATH", "TZ", "TZDIR")  # the others may be secrets
_FIRST_FREE_FD = 3


class _Worker:
    """One started process and the socket that is its standard input and output."""

    def __init__(self) -> None:
        if not sys.executable:
            raise OSError("sys.executable is not known")
        ours, theirs = socket.socketpair()
        with theirs:
            self._socket = _above_standard_files(ours)
            try:
                self._process = subprocess.Popen(
                    # Isolated and without `site`: nothing but the parent's path is imported from.
                    [sys.executable, *_flags(), "-c", _CODE, *_import_path()],
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=subprocess.DEVNULL,
                    cwd="/",
                    env={n: os.environ[n] for n in _KEPT_VARIABLES if n in os.environ},
                    start_new_session=True,  # Ctrl-C is for the parent
                )
            except BaseException:
                self._socket.close()
                raise
        self.pid = self._process.pid

    def is_running(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: bytes) -> dict[str, Any]:
        """Return the answer to `request`; raise EOFError if there is none."""
        deadline = time.monotonic() + MAX_WAIT
        self._socket.settimeout(MAX_WAIT)
        self._socket.sendall(len(request).to_bytes(LENGTH_BYTES, "big"))
        self._socket.sendall(request)
        size = int.from_bytes(self._receive(LENGTH_BYTES, deadline), "big")
        if size > _MAX_ANSWER_BYTES:
            raise EOFError
        answer = json.loads(self._receive(size, deadline))
        if not isinstance(answer, dict):
            raise EOFError
        return answer

    def _receive(self, count: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < count:
            self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
            part = self._socket.recv(min(count - len(data), 1 << 20))
            if not part:
                raise EOFError
            data += part
        return bytes(data)

    def stop(self, wait: float = 0.0) -> int:
        """End the process, by force after `wait` seconds; return its exit code, -N for signal N."""
        self._socket.close()
        try:
            return self._process.wait(wait)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def forget(self) -> None:
        """Leave the process to the one that started it, from which this one was forked."""
        self._socket.close()
        self._process.returncode = 0  # it is not a child of this process


class TemplateProcess:
    """Starts the process that runs templates, asks it, and replaces it when it has ended.

    Several threads may use it: their requests are served one after another.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worker: _Worker | None = None

    def worker_pid(self) -> int | None:
        """Return the process id of the worker; None if there is none."""
        return self._worker.pid if self._worker else None

    def start(self) -> None:
        """Start the worker, if there is none, and return without waiting for its imports.

        Raises
        ------
        TemplateError
            If no process can be started.
        """
        with self._lock:
            self._running()

    def ask(self, source: str, values: Mapping[str, Any] | None = None) -> Any:
        """Return the text of a template; without `values`, what the template reads.

        Raises
        ------
        RequestError
            If `values` take more than `MAX_REQUEST_BYTES`.
        TemplateError
            If the template fails or exceeds a limit, or no process can be started.
        """
        request = {"source": source, "seconds": MAX_SECONDS}
        data = pack(request if values is None else {**request, "values": values})
        if len(data) > MAX_REQUEST_BYTES:
            raise RequestError(
                f"messages, tools and variables must have at most {MAX_REQUEST_BYTES} bytes "
                f"in total, as JSON; got {len(data)}"
            )
        with self._lock:
            answer = self._ask(data)
            if answer is None:  # the process was killed, maybe before this request
                answer = self._ask(data)
        if answer is None:
            raise TemplateError("the chat template failed: its process was killed")
        if "failed" in answer:
            raise TemplateError(f"the chat template failed{excerpt(answer['failed'])}")
        return answer["result"]

    def close(self) -> None:
        """End the worker, if there is one."""
        with self._lock:
            self._end(_LEFT_SECONDS)

    def forget(self) -> None:
        """Forget the worker, in a process forked from the one that started it."""
        self._lock = threading.Lock()  # another thread may have held it
        if self._worker is not None:
            self._worker.forget()
            self._worker = None

    def _running(self) -> _Worker:
        if self._worker is not None and not self._worker.is_running():
            self._end()
        if self._worker is None:
            try:
                self._worker = _Worker()
            except OSError as error:
                raise TemplateError(
                    f"the process that runs chat templates cannot be started ({error})"
                ) from error
        return self._worker

    def _ask(self, request: bytes) -> dict[str, Any] | None:
        """Return the worker's answer, or None if something else than a limit ended it."""
        worker = self._running()
        try:
            answer = worker.ask(request)
            if answer.get("is_last"):
                self._end(_LEFT_SECONDS)
            return answer
        except TimeoutError:
            self._end()
            return {"failed": f": it did not answer within {MAX_WAIT:g} s"}
        except (EOFError, OSError, ValueError):
            code = self._end(_LEFT_SECONDS)
            if code in (-signal.SIGKILL, -signal.SIGTERM):
                return None
            return {"failed": f": {_cause_of_death(code)}"}
        except BaseException:
            # An answer may be left in the socket, which would become that of the next request.
            self._end()
            raise

    def _end(self, wait: float = 0.0) -> int:
        worker = self._worker
        self._worker = None
        return worker.stop(wait) if worker else 0


def _above_standard_files(ours: socket.socket) -> socket.socket:
    """Return `ours` with a descriptor above 2, which it has if the standard files are open.

    Otherwise whatever this process prints would be sent to the other end.
    """
    if ours.fileno() >= _FIRST_FREE_FD:
        return ours
    with ours:
        return socket.socket(
            fileno=fcntl.fcntl(ours.fileno(), fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE_FD)
        )


def _flags() -> list[str]:
    return ["-I", "-S", *(["-B"] if sys.dont_write_bytecode else [])]


def _import_path() -> list[str]:
    return [os.path.abspath(path) for path in sys.path if isinstance(path, str)]


def _cause_of_death(code: int) -> str:
    if code == -signal.SIGPROF:
        return f"it ran longer than {MAX_SECONDS:g} s"
    how = f"exit code {code}"
    with contextlib.suppress(ValueError):
        how = signal.Signals(-code).name
    return f"it took more than {MAX_MEMORY >> 20} MiB, or crashed ({how})"


_PROCESS = TemplateProcess()
ask = _PROCESS.ask
close = _PROCESS.close
start = _PROCESS.start
worker_pid = _PROCESS.worker_pid
os.register_at_fork(after_in_child=_PROCESS.forget)
atexit.register(close)
