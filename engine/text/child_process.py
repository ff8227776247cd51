"""Isolated child processes: long-lived ones, and workers that answer one request at a time.

A worker passes untrusted input (a chat template, a tokenizer's regular expression, a grammar) to
library code that cannot be interrupted. So its limits are enforced from outside that code: CPU time
(`incoming`), memory and files (`set_limits`) by the kernel, answer size and waiting time by the
parent (`Worker.ask`).

Messages are frames: an 8-byte little-endian length, followed by that many bytes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

if sys.platform != "win32":  # the other modules can be imported there; a worker cannot be started
    import fcntl
    import resource

__all__ = [
    "Worker",
    "WorkerEndedError",
    "descendants",
    "incoming",
    "kill_descendants",
    "kill_tree",
    "memory_gauge",
    "receive",
    "reply",
    "send",
    "set_limits",
    "start",
]

_HEAD_BYTES = 8  # bytes of the length field
_KEPT_VARIABLES = ("LD_LIBRARY_PATH", "TZ", "TZDIR")  # all others may hold secrets
_EXIT_SECONDS = 5.0  # time for a worker to exit after it closed its socket
_IDLE_SECONDS = 0.5  # time for an idle worker to exit after its socket was closed
_FIRST_FREE_FD = 3
_SET_IMPORT_PATH = "import json, sys; sys.path[:0] = json.loads(sys.argv[1])\n"


def start(
    code: str,
    env: Mapping[str, str],
    *,
    flags: Sequence[str] = ("-I",),
    stdin: int = subprocess.PIPE,
    stdout: int = subprocess.PIPE,
    stderr: int | None = None,
    descriptors: Collection[int] = (),
    cwd: str | None = None,
) -> subprocess.Popen[bytes]:
    """Start Python running `code`, with this process's import path.

    The child is isolated (-I) and gets no relative path entries, so it imports no module from the
    current directory, which may be a model's. It inherits `descriptors`.

    Raises
    ------
    OSError
        If the process cannot be started.
    """
    if not sys.executable:
        raise OSError("sys.executable is not known")
    paths = [str(Path(__file__).parents[2]), *filter(os.path.isabs, sys.path)]
    return subprocess.Popen(
        [sys.executable, *flags, "-c", _SET_IMPORT_PATH + code, json.dumps(paths)],
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        env=env,
        cwd=cwd,
        pass_fds=descriptors,
        start_new_session=True,  # Ctrl-C in the terminal interrupts only the parent
    )


def kill_tree(pid: int) -> None:
    """Kill a process that this one has started and not waited for, and all that it has started.

    They would end by themselves once it is gone, but for one that is stopped.
    """
    below = descendants(pid)  # once it is dead, they have another parent
    for each in (pid, *below):
        _kill(each)


def kill_descendants() -> None:
    """Kill all that this process has started. See `kill_tree`."""
    for each in descendants(os.getpid()):
        _kill(each)


def _kill(pid: int) -> None:
    with contextlib.suppress(OSError):  # it has ended
        os.kill(pid, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    """Return the ids of a process's children, and of theirs; none on a system without /proc."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            parent = int(path.read_text(errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found = [pid]
    for parent in found:
        found += children.get(parent, [])
    return found[1:]


def send(pipe: Any, frame: bytes) -> None:
    """Write a frame to a binary file."""
    pipe.write(len(frame).to_bytes(_HEAD_BYTES, "little"))
    pipe.write(frame)
    pipe.flush()


def receive(pipe: Any) -> bytes | None:
    """Read the next frame from a binary file; None at its end."""
    head = pipe.read(_HEAD_BYTES)
    size = int.from_bytes(head, "little")
    frame: bytes = pipe.read(size) if len(head) == _HEAD_BYTES else b""
    return frame if len(head) == _HEAD_BYTES and len(frame) == size else None


class WorkerEndedError(Exception):
    """A worker ended, or was ended, before it answered.

    Attributes
    ----------
    code : int or None
        Exit code, -N for signal N; None if it was killed because it did not answer in time.
    """

    def __init__(self, code: int | None) -> None:
        super().__init__(f"exit code {code}")
        self.code = code


class Worker:
    """A child process that answers requests: started by the first, replaced if it dies.

    Requests from several threads are served one after another. A forked process starts its own
    child. The child ends with this object, or with the parent.

    Parameters
    ----------
    code : str
        Python code that the process runs; it must serve `incoming`.
    max_answer_bytes : int
        Longest answer; a process that announces a longer one is ended.
    env : mapping of str to str, optional
        Environment variables besides LD_LIBRARY_PATH, TZ and TZDIR.
    setup : (bytes, float), optional
        First request to every new process, and its CPU seconds; the process does not answer it.
    """

    def __init__(
        self,
        code: str,
        max_answer_bytes: int,
        *,
        env: Mapping[str, str] | None = None,
        setup: tuple[bytes, float] | None = None,
    ) -> None:
        self._code = code
        self._max_answer_bytes = max_answer_bytes
        self._env = env or {}
        self._setup = [] if setup is None else [setup]
        self._child: _Child | None = None
        self._lock = threading.Lock()
        _WORKERS.add(self)

    @property
    def pid(self) -> int | None:
        """Process id; None while no process exists."""
        return self._child.process.pid if self._child else None

    def start(self) -> None:
        """Start the process if it is not running, without waiting for its imports.

        Raises
        ------
        OSError
            If the process cannot be started.
        """
        with self._lock:
            self._running()

    def ask(
        self, request: bytes, seconds: float, *, wait: float | None = None, tries: int = 2
    ) -> bytes:
        """Return the answer to `request`.

        Parameters
        ----------
        seconds : float
            CPU seconds after which SIGPROF ends the process, independent of the machine's load.
        wait : float, optional
            Wall-clock seconds after which a process that has not answered is killed.
        tries : int
            Maximum attempts if the process exits with 0 or is killed from outside (SIGKILL,
            SIGTERM), which may have happened before this request.

        Raises
        ------
        WorkerEndedError
            If the process ended or was killed.
        OSError
            If the process cannot be started.
        """
        with self._lock:
            for _ in range(tries - 1):
                try:
                    return self._ask(request, seconds, wait)
                except WorkerEndedError as error:
                    if error.code not in (0, -signal.SIGKILL, -signal.SIGTERM):
                        raise
            return self._ask(request, seconds, wait)

    def close(self) -> None:
        """End the process; the next request starts a new one."""
        with self._lock:
            self._end(_EXIT_SECONDS)

    def _running(self) -> _Child:
        if self._child is None:
            child = _Child(self._code, self._env)
            self._finish = weakref.finalize(self, child.end, _IDLE_SECONDS)
            self._unsent = self._setup
            self._child = child
        return self._child

    def _ask(self, request: bytes, seconds: float, wait: float | None) -> bytes:
        child = self._running()
        child.deadline = None if wait is None else time.monotonic() + wait
        try:
            for frame, cpu_seconds in (*self._unsent, (request, seconds)):
                child.send(str(cpu_seconds).encode())
                child.send(frame)
            self._unsent = []
            return child.receive(self._max_answer_bytes)
        except TimeoutError:
            self._end(0)
            raise WorkerEndedError(None) from None
        except (EOFError, OSError):
            raise WorkerEndedError(self._end(_EXIT_SECONDS)) from None
        except BaseException:
            # Interrupted: the next request would read this one's answer.
            self._end(0)
            raise

    def _end(self, seconds: float) -> int | None:
        child = self._child
        self._child = None
        if child is None:
            return None
        self._finish.detach()
        return child.end(seconds)

    def _forget(self) -> None:
        """Leave the process to the parent that this process was forked from."""
        self._lock = threading.Lock()  # another thread may have held it
        if self._child is not None:
            self._finish.detach()
            self._child.forget()
            self._child = None


class _Child:
    """A worker's process, and the socket that serves as its stdin and stdout."""

    def __init__(self, code: str, env: Mapping[str, str]) -> None:
        if sys.platform == "win32":
            raise OSError("it needs limits of Linux or macOS; on Windows, run in WSL")
        self.deadline: float | None = None  # time.monotonic() at which send and receive give up
        # -S: without `site`, whose .pth files may run code.
        flags = ["-I", "-S", *(["-B"] if sys.dont_write_bytecode else [])]
        ours, theirs = socket.socketpair()
        with theirs:
            self._socket = _above_standard_files(ours)
            try:
                self.process = start(
                    code,
                    {n: os.environ[n] for n in _KEPT_VARIABLES if n in os.environ} | dict(env),
                    flags=flags,
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=subprocess.DEVNULL,  # Rust libraries print panics there
                    cwd="/",
                )
            except BaseException:
                self._socket.close()
                raise

    def send(self, frame: bytes) -> None:
        """Send a frame; raise TimeoutError at the deadline."""
        for part in (len(frame).to_bytes(_HEAD_BYTES, "little"), frame):
            self._set_timeout()
            self._socket.sendall(part)

    def receive(self, max_bytes: int) -> bytes:
        """Return the next frame; raise TimeoutError at the deadline.

        Raises
        ------
        EOFError
            If the process has closed the socket, or the frame is longer than `max_bytes`.
        """
        size = int.from_bytes(self._read(_HEAD_BYTES), "little")
        if size > max_bytes:
            raise EOFError
        return self._read(size)

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            self._set_timeout()
            part = self._socket.recv(min(size - len(data), 1 << 20))
            if not part:
                raise EOFError
            data += part
        return bytes(data)

    def _set_timeout(self) -> None:
        if self.deadline is None:
            self._socket.settimeout(None)
        else:
            self._socket.settimeout(max(self.deadline - time.monotonic(), 0.001))

    def end(self, seconds: float) -> int:
        """Close the socket, kill the process after `seconds`; return its exit code."""
        self._socket.close()
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def forget(self) -> None:
        self._socket.close()
        self.process.returncode = 0  # not a child of this process, which cannot wait for it


def _above_standard_files(ours: socket.socket) -> socket.socket:
    """Return the socket with a descriptor above 2.

    If the parent's standard files are closed, the socket may have got stdout's descriptor, and the
    worker would receive everything the parent prints.
    """
    if ours.fileno() >= _FIRST_FREE_FD:
        return ours
    with ours:
        return socket.socket(
            fileno=fcntl.fcntl(ours.fileno(), fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE_FD)
        )


_WORKERS: weakref.WeakSet[Worker] = weakref.WeakSet()


def _forget_all() -> None:
    for worker in list(_WORKERS):
        worker._forget()


if hasattr(os, "register_at_fork"):  # Windows cannot fork
    os.register_at_fork(after_in_child=_forget_all)


def incoming() -> Iterator[bytes]:
    """Yield the requests sent to this worker process; exit when the parent closes the socket.

    A CPU timer runs while a request is served; its signal ends the process.
    """
    # Blocked and ignored signals are inherited from the parent.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    source = sys.stdin.buffer
    while (seconds := receive(source)) and (request := receive(source)) is not None:
        signal.setitimer(signal.ITIMER_PROF, float(seconds))
        yield request
        signal.setitimer(signal.ITIMER_PROF, 0)
    os._exit(0)  # at once, whatever a request left behind


def reply(answer: bytes) -> None:
    """Answer the request last yielded by `incoming`."""
    send(sys.stdout.buffer, answer)


def set_limits(memory: int, *forbidden: int) -> None:
    """Limit this process's resources; it can then neither dump core nor write files.

    Parameters
    ----------
    memory : int
        Bytes of address space; 0 is unlimited, as is macOS.
    forbidden : int
        Additional resources (``resource.RLIMIT_*``) to limit to 0.
    """
    limits = dict.fromkeys((resource.RLIMIT_CORE, resource.RLIMIT_FSIZE, *forbidden), 0)
    if memory and sys.platform != "darwin":  # macOS refuses limits below what its libraries map
        limits[resource.RLIMIT_AS] = memory
    for limit, value in limits.items():
        _, hard = resource.getrlimit(limit)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))


def memory_gauge() -> Callable[[], int]:
    """Return a function that measures this process's address space in bytes; 0 if unknown.

    That function opens no file, so it works even after files are forbidden.
    """
    try:
        file = os.open("/proc/self/statm", os.O_RDONLY)
    except OSError:
        return lambda: 0
    page = resource.getpagesize()
    return lambda: int(os.pread(file, 64, 0).split()[0]) * page
