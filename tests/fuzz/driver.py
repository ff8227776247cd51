"""Starts workers, hands out cases, keeps what failed, and counts."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import re
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from tests.fuzz.limits import Limits
from tests.fuzz.worker import case_of

ROOT = Path(__file__).parents[2]
START_SECONDS = 120.0
KEPT_PER_KIND = 3  # files kept of failures with the same last line and place
_ENV = {
    "OPENBLAS_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "ENGINE_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONHASHSEED": "0",
}


class WorkerDied(Exception):
    """The worker crashed, hung, or ended."""


class SetupError(Exception):
    """A worker ended before its first case: what is valid was refused, or the fuzzer is broken."""


class Worker:
    """A worker process of one target, started when it is first asked."""

    def __init__(self, target: str, seed: int, limits: Limits) -> None:
        self._arguments = [sys.executable, "-m", "tests.fuzz.worker", target, str(seed)]
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None
        self._log: Any = None
        self._folder: str | None = None

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the worker's answer.

        Raises
        ------
        WorkerDied
            With the reason and the end of what it printed.
        """
        if self._process is None:
            self._start()
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        return self._receive(self._limits.wall_seconds)

    def _start(self) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            self._arguments,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, **_ENV, "PYTHONPATH": path},
            start_new_session=True,
        )
        try:
            self._folder = self._receive(START_SECONDS)["folder"]
        except WorkerDied as fault:
            raise SetupError(str(fault)) from None

    def _receive(self, seconds: float) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], seconds)
        line = self._process.stdout.readline() if ready else b""
        if line.endswith(b"\n"):
            answer: dict[str, Any] = json.loads(line)
            return answer
        if not ready:
            reason = f"Hang: no end after {seconds:g} s"
        else:
            reason = f"Crash: the worker ended with status {self._process.wait(30)}"
        raise WorkerDied(f"{self.stop()}\n{reason}")

    def stop(self) -> str:
        """End the process and remove its folder; return the end of what it printed."""
        if self._process is None:
            return ""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._log.seek(max(self._log.tell() - 4000, 0))
        printed = self._log.read().decode("utf-8", "replace")
        self._log.close()
        self._process = self._folder = None
        return str(printed)


@dataclass
class Result:
    """What the cases of a target came to."""

    target: str
    num_cases: int = 0
    num_failures: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)


class Campaign:
    """Runs cases of one target on several workers.

    Parameters
    ----------
    target : str
    seed : int
    folder : Path
        Where cases that failed are kept.
    jobs : int
        Number of workers.
    out : text file
        Where failures are reported.
    """

    def __init__(self, target: str, seed: int, folder: Path, jobs: int, out: TextIO) -> None:
        self.seed, self.folder, self.jobs, self.out = seed, folder, jobs, out
        self.limits: Limits = importlib.import_module(f"tests.fuzz.{target}").LIMITS
        self.result = Result(target)
        self._indexes = itertools.count()
        self._lock = threading.Lock()
        self._broken: SetupError | None = None

    def run(self, cases: int | None, seconds: float | None) -> Result:
        """Run this many cases, or for this long."""
        start = time.monotonic()

        def may_go_on(index: int) -> bool:
            is_late = seconds is not None and time.monotonic() - start > seconds
            return not (is_late or self._broken) and (cases is None or index < cases)

        threads = [
            threading.Thread(target=self._serve, args=(may_go_on,)) for _ in range(self.jobs)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._broken is not None:
            raise self._broken
        self.result.seconds = time.monotonic() - start
        return self.result

    def _serve(self, may_go_on: Callable[[int], bool]) -> None:
        worker = Worker(self.result.target, self.seed, self.limits)
        try:
            while True:
                with self._lock:
                    index = next(self._indexes)
                if not may_go_on(index):
                    return
                try:
                    answer = worker.ask({"index": index})
                except WorkerDied as fault:
                    answer = {"outcome": "", "error": str(fault), "seconds": 0.0}
                with self._lock:
                    self._note(index, answer)
                if answer["error"]:
                    worker.stop()  # what failed may have damaged it
        except SetupError as fault:
            self._broken = fault
        finally:
            worker.stop()

    def _note(self, index: int, answer: dict[str, Any]) -> None:
        result = self.result
        result.num_cases += 1
        result.slowest = max(result.slowest, answer["seconds"])
        if not answer["error"]:
            result.outcomes[answer["outcome"]] += 1
            return
        result.num_failures += 1
        kind = kind_of(answer["error"])
        result.kinds[kind] += 1
        if result.kinds[kind] <= KEPT_PER_KIND:
            path = self._keep(index, answer["error"])
            print(f"FAIL {kind}\n     python -m tests.fuzz --replay {path}", file=self.out)

    def _keep(self, index: int, error: str) -> Path:
        name = self.result.target
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{name}-{self.seed}-{index}.json"
        case = case_of(name, self.seed, index)
        record = {"target": name, "seed": self.seed, "index": index, "case": case, "error": error}
        path.write_text(json.dumps(record, indent=1) + "\n")
        return path


def kind_of(error: str) -> str:
    """Return target-independent text by which equal failures are counted: last line and place."""
    lines = [line for line in error.splitlines() if line[:1].strip()] or ["?"]
    places = re.findall(r'File "[^"]*?((?:engine|tests)/[^"]+)", line (\d+)', error)
    where = ":".join(places[-1]) if places else ""
    return f"{re.sub(r'[0-9]+', '#', lines[-1])[:160]} {where}".strip()


def replay(path: Path, out: TextIO) -> bool:
    """Run a kept case again; tell whether it passes."""
    record = json.loads(path.read_text())
    limits: Limits = importlib.import_module(f"tests.fuzz.{record['target']}").LIMITS
    worker = Worker(record["target"], record["seed"], limits)
    try:
        answer = worker.ask({"case": record["case"]})
    except WorkerDied as fault:
        answer = {"outcome": "", "error": str(fault), "seconds": 0.0}
    finally:
        worker.stop()
    print(answer["error"] or f"passes: {answer['outcome']}", file=out)
    return not answer["error"]
