"""Start and end the processes of ranks 1, 2, ...

Every rank is a new interpreter, never a fork. Its standard input is a pipe from rank 0: the first
frame names the function to run, and the rank ends when the pipe closes, however rank 0 ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib import import_module
from typing import Any

from engine.distributed.group import BEAT, PID, Group, GroupEnded
from engine.distributed.log_stream import drain_stderr, use_bounded_stderr
from engine.distributed.segment import Segment
from engine.errors import RankError
from engine.text import child_process

__all__ = [
    "RankProcesses",
    "describe_ending",
    "end_processes",
    "end_with_parent",
    "exit_at_once",
    "run_rank",
    "thread_environment",
]

_CODE = "from engine.distributed.processes import run_rank; run_rank()"
_START_SECONDS = 120.0  # startup timeout of an interpreter on a busy machine
_END_SECONDS = 5.0  # grace period before ranks are killed
_WATCH_SECONDS = 0.25  # polling interval of the failure watcher
_BEAT_SECONDS = 0.5  # interval of a rank's heartbeats
_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


class RankProcesses:
    """The processes of ranks 1, 2, ... of a group; this process is rank 0.

    Parameters
    ----------
    target : str
        "module:function", called as ``function(group, options)`` in ranks 1, 2, ...
    size : int
        Number of ranks, rank 0 included.
    options : mapping
        JSON values for `target`.
    timeout : float
        Timeout of the group in seconds.
    num_threads : int, optional
        BLAS threads per rank, unless the environment sets them.

    Attributes
    ----------
    group : Group
        Rank 0's `Group`.

    Raises
    ------
    RankError
        If a process cannot be started.
    """

    def __init__(
        self,
        target: str,
        size: int,
        options: Mapping[str, Any],
        *,
        timeout: float = 60.0,
        num_threads: int | None = None,
    ) -> None:
        segment = Segment.create(size)
        self._processes: list[subprocess.Popen[bytes]] = []
        self.group = Group(segment, 0, timeout=timeout, dead=partial(_dead, self._processes))
        # Runs also when the object is garbage-collected or this process ends.
        self._end = weakref.finalize(self, _end, self.group, self._processes)
        task = {"target": target, "size": size, "descriptor": segment.descriptor}
        task |= {"timeout": timeout, "options": dict(options)}
        try:
            for rank in range(1, size):
                self._start({**task, "rank": rank}, thread_environment(num_threads))
            self._wait_until_attached()
            threading.Thread(target=_watch, args=(self.group, self._end), daemon=True).start()
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Process ids of ranks 1, 2, ..."""
        return [process.pid for process in self._processes]

    def close(self) -> None:
        """End all ranks; a second call does nothing.

        Processes that do not end by themselves within seconds are killed.
        """
        self._end()
        for process in self._processes:  # another thread may be ending them already
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(2 * _END_SECONDS)

    def _start(self, task: dict[str, Any], env: Mapping[str, str]) -> None:
        descriptor = task["descriptor"]
        try:
            process = child_process.start(_CODE, env, descriptors=(descriptor,))
        except OSError as error:
            raise RankError(f"rank {task['rank']} could not be started: {error}") from error
        self._processes.append(process)
        with contextlib.suppress(OSError):  # a dead process never attaches
            child_process.send(process.stdin, json.dumps(task).encode())

    def _wait_until_attached(self) -> None:
        ranks = self.group.segment.ranks
        self.group.segment.ranks[0, PID] = os.getpid()
        self.group.wait(
            lambda: (ranks[:, PID] == 0).nonzero()[0].tolist(), "the start", _START_SECONDS
        )


def _dead(processes: list[subprocess.Popen[bytes]]) -> Iterator[tuple[int, str]]:
    """Yield (rank, reason) for each process that has ended."""
    for rank, process in enumerate(processes, 1):
        if process.poll() is not None:
            yield rank, describe_ending(process.returncode)


def _watch(group: Group, end: Callable[[], Any]) -> None:
    """End a group when one of its ranks fails, even while rank 0 is idle."""
    while not group.is_closing:
        try:
            group.check()
        except RankError:
            with contextlib.suppress(Exception):  # the ranks are ended even if this fails
                group.on_failure()
            end()
            return
        time.sleep(_WATCH_SECONDS)


def _end(group: Group, processes: list[subprocess.Popen[bytes]]) -> None:
    """End the processes of a group."""
    group.close()
    end_processes(processes, _END_SECONDS)
    group.segment.close()


def end_processes(processes: Iterable[subprocess.Popen[bytes]], seconds: float) -> None:
    """Close the processes' pipes, so that they end; kill those still alive after `seconds`.

    Those that they have started are killed with them.
    """
    processes = list(processes)
    for process in processes:
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
    deadline = time.monotonic() + seconds
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child_process.kill_tree(process.pid)
            process.wait()
        assert process.stdout is not None
        process.stdout.close()


def run_rank() -> None:
    """Run the task that arrives on standard input, in the process of a rank."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 handles it, and ends this process
    use_bounded_stderr()
    frame = child_process.receive(sys.stdin.buffer)
    if frame is None:
        sys.exit(1)
    task = json.loads(frame)
    threading.Thread(target=end_with_parent, daemon=True).start()
    segment = Segment.attach(task["descriptor"], task["size"])
    segment.close()
    group = Group(segment, task["rank"], timeout=task["timeout"])
    threading.Thread(target=_beat, args=(group,), daemon=True).start()
    module, name = task["target"].split(":")
    try:
        function = getattr(import_module(module), name)
        # Only now: from here on, the group's timeout applies, which is not meant for imports.
        segment.ranks[group.rank, PID] = os.getpid()
        function(group, task["options"])
        group.end()
    except GroupEnded:
        group.end()
    except BaseException as error:
        group.fail(error)
        exit_at_once(1)
    exit_at_once(0)


def _beat(group: Group) -> None:
    """Show that this process runs, whatever its main thread waits for."""
    while True:
        group.segment.ranks[group.rank, BEAT] += 1
        time.sleep(_BEAT_SECONDS)


def exit_at_once(status: int) -> None:
    """Exit without cleanup: nothing is left to write, and a CUDA driver may hang on exit.

    Ranks of this process that have not ended by now are killed.
    """
    drain_stderr()
    child_process.kill_descendants()
    os._exit(status)


def end_with_parent() -> None:
    """End this process once the one that started it has ended, whatever this process is doing."""
    with contextlib.suppress(OSError, ValueError):
        os.read(sys.stdin.fileno(), 1)
    time.sleep(_END_SECONDS / 2)  # after a normal end of the group, this process ends by itself
    exit_at_once(1)


def thread_environment(num_threads: int | None) -> dict[str, str]:
    """Return the environment of a child process whose BLAS uses `num_threads` threads."""
    env = dict(os.environ)
    if num_threads is not None and not any(name in env for name in _THREADS):
        env |= dict.fromkeys(_THREADS, str(num_threads))
    return env


def describe_ending(code: int) -> str:
    """Describe how a process with this exit code ended."""
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit status {code}"
