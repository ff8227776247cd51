"""Distributes requests to worker processes, and collects their answers."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from engine.commands.bench_serve.connection import Answer
from engine.commands.bench_serve.workload import COMPLETIONS, Job
from engine.errors import EngineError

__all__ = ["Target", "run_load"]

_CODE = (
    "import sys; sys.path[:] = sys.argv[1:]\n"
    "from engine.commands.bench_serve.worker import main; main()"
)
_LEAD = 0.1  # seconds between the last worker becoming ready and the start


@dataclass(frozen=True)
class Target:
    """The server, and the fields shared by all requests.

    Attributes
    ----------
    host, port, tls
        The server's address.
    path : str
        Request path of the endpoint.
    endpoint : str
        ``/v1/completions`` or ``/v1/chat/completions``.
    model : str
    api_key : str or None
    body : dict
        Fields sent in every body besides the prompt, such as ``temperature``.
    timeout : float
        Maximum seconds per request.
    """

    host: str
    port: int
    tls: bool
    path: str
    endpoint: str
    model: str
    api_key: str | None
    body: dict[str, Any]
    timeout: float

    def plan(
        self, jobs: Sequence[Job], moments: Sequence[float], max_concurrency: int
    ) -> dict[str, Any]:
        """Return the plan for one worker (see `worker.run_jobs`)."""
        rows = [
            (moment, self._body(job), job.num_output_tokens)
            for moment, job in zip(moments, jobs, strict=True)
        ]
        name = f"[{self.host}]" if ":" in self.host else self.host
        headers = {
            "Host": f"{name}:{self.port}",
            "Content-Type": "application/json",
            "Accept": "text/event-stream",
        }
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        return {
            "host": self.host,
            "port": self.port,
            "tls": self.tls,
            "path": self.path,
            "headers": headers,
            "jobs": rows,
            "max_concurrency": max_concurrency,
            "timeout": self.timeout,
        }

    def _body(self, job: Job) -> dict[str, Any]:
        most = "max_tokens" if self.endpoint == COMPLETIONS else "max_completion_tokens"
        return {
            "model": self.model,
            **job.prompt,
            most: job.num_output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.body,
        }


def run_load(
    target: Target,
    jobs: Sequence[Job],
    moments: Sequence[float],
    *,
    max_concurrency: int = 0,
    workers: int = 1,
    progress: bool = False,
) -> list[Answer]:
    """Send each job at its time; return the answers in job order.

    Parameters
    ----------
    target : Target
    jobs : sequence of Job
    moments : sequence of float
        Send time of each job, in seconds from the start, ascending.
    max_concurrency : int
        Maximum requests in flight, divided among the workers; 0: no limit.
    workers : int
        Number of processes, limited to `max_concurrency`.
    progress : bool
        Show a progress bar on standard error.

    Raises
    ------
    EngineError
        If a worker dies.
    """
    workers = min(workers, len(jobs), max_concurrency or workers)
    plans = []
    for index in range(workers):
        share = max_concurrency // workers + (index < max_concurrency % workers)
        plans.append(target.plan(jobs[index::workers], moments[index::workers], share))
    with tqdm(total=len(jobs), unit="request", disable=not progress, leave=False) as bar:
        shares = _drive(plans, bar)
    answers = [Answer()] * len(jobs)
    for index, share_of_answers in enumerate(shares):
        answers[index::workers] = share_of_answers
    return answers


def _drive(plans: Sequence[dict[str, Any]], bar: Any) -> list[list[Answer]]:
    """Run each plan in a worker, all starting at the same time; return their answers."""
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(len(plans)))
        workers = [_Worker(plan, stack) for plan in plans]
        list(pool.map(_Worker.prepare, workers))
        start = time.monotonic() + _LEAD
        lock = threading.Lock()

        def note() -> None:
            with lock:
                bar.update()

        return list(pool.map(lambda worker: worker.run(start, note), workers))


class _Worker:
    """Worker process; the `ExitStack` guarantees that it is terminated."""

    def __init__(self, plan: dict[str, Any], stack: contextlib.ExitStack) -> None:
        root = str(Path(__file__).parents[3])  # the package's parent folder, installed or not
        paths = [root, *filter(os.path.isabs, sys.path)]  # excludes the current folder
        self._plan = plan
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CODE, *paths],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        stack.callback(self._end)

    def prepare(self) -> None:
        """Send the plan, and wait until the worker has read it."""
        self._write(json.dumps(self._plan))
        self._line()

    def run(self, start: float, note: Callable[[], None]) -> list[Answer]:
        """Start the worker at `time.monotonic()` == `start`; return its answers."""
        self._write(repr(start))
        while (line := self._line()) == b".\n":
            note()
        rows = json.loads(line)
        return [Answer(begin, end, array("d", times), *rest) for begin, end, times, *rest in rows]

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise EngineError("a worker process ended too early") from error

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            raise EngineError("a worker process ended too early")
        return line

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
