"""Deals the requests of a load to worker processes, and collects their answers."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from engine.commands.bench_serve.connection import Answer
from engine.commands.bench_serve.workload import COMPLETIONS, Job
from engine.errors import EngineError

__all__ = ["Target", "run_load"]

_MAX_LINE = 1 << 30  # the answers of a worker
_LEAD = 0.1  # seconds from "all are ready" to the start


@dataclass(frozen=True)
class Target:
    """The server, and what all requests to it share.

    Attributes
    ----------
    host, port, tls
        Where it listens.
    path : str
        Of the endpoint, as the request line has it.
    endpoint : str
        ``/v1/completions`` or ``/v1/chat/completions``.
    model : str
    api_key : str or None
    body : dict
        Fields that every body has beside the prompt, as ``temperature``.
    timeout : float
        Seconds for a request.
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
        """Return the plan of one worker (see `worker.run_jobs`)."""
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
    """Send each job at its moment, and return the answers in the order of the jobs.

    Parameters
    ----------
    target : Target
    jobs : sequence of Job
    moments : sequence of float
        Seconds from the start.
    max_concurrency : int
        Requests in flight at most, shared by the workers; 0 sets no limit.
    workers : int
        Processes; no more than `max_concurrency` are started.
    progress : bool
        Show a bar on standard error.

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
        shares = asyncio.run(_drive(plans, bar))
    answers = [Answer()] * len(jobs)
    for index, share_of_answers in enumerate(shares):
        answers[index::workers] = share_of_answers
    return answers


async def _drive(plans: list[dict[str, Any]], bar: Any) -> list[list[Answer]]:
    processes: list[asyncio.subprocess.Process] = []
    try:
        for plan in plans:
            processes.append(await _start(plan))
        for process in processes:
            await _line(process)  # "ready"
        start = f"{time.monotonic() + _LEAD!r}\n".encode()
        for process in processes:
            _stdin(process).write(start)
        return await asyncio.gather(*(_answers(process, bar) for process in processes))
    except ConnectionError as error:
        raise EngineError("a worker process ended too early") from error
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def _start(plan: dict[str, Any]) -> asyncio.subprocess.Process:
    root = str(Path(__file__).parents[3])  # where the package lies, installed or not
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "engine.commands.bench_serve.worker"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=_MAX_LINE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    _stdin(process).write(json.dumps(plan).encode() + b"\n")
    await _stdin(process).drain()
    return process


def _stdin(process: asyncio.subprocess.Process) -> asyncio.StreamWriter:
    assert process.stdin is not None
    return process.stdin


async def _line(process: asyncio.subprocess.Process) -> bytes:
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line.endswith(b"\n"):
        raise EngineError(f"a worker process ended too early, with status {await process.wait()}")
    return line


async def _answers(process: asyncio.subprocess.Process, bar: Any) -> list[Answer]:
    while (line := await _line(process)) == b".\n":
        bar.update()
    _stdin(process).close()
    answers = []
    for start, end, times, *rest in json.loads(line):
        answers.append(Answer(start, end, array("d", times), *rest))
    await process.wait()
    return answers
