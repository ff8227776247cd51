"""Runs the cases of one target that the driver asks for, one after another.

``python -m tests.fuzz.worker TARGET SEED`` reads lines of JSON, ``{"index": 5}`` or
``{"case": {...}}``, and answers each with a line.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import random
import resource
import shutil
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any

from tests.fuzz.limits import cpu_seconds, peak_bytes

CHECK_EVERY = 200  # cases between two counts of the open files
MAX_NEW_FILES = 24


def case_of(target: str, seed: int, index: int) -> dict[str, Any]:
    """Return a case; it depends on these three values only."""
    module = importlib.import_module(f"tests.fuzz.{target}")
    return module.make(random.Random(f"{seed}/{target}/{index}"))


class _Worker:
    def __init__(self, target: str, seed: int, folder: Path) -> None:
        self.target, self.seed = target, seed
        module = importlib.import_module(f"tests.fuzz.{target}")
        self.limits = module.LIMITS
        self.runner = module.Runner(folder)
        _limit_memory(self.limits.memory_bytes)
        self.max_peak = peak_bytes() + self.limits.memory_bytes
        self.num_files = self.count = 0

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run one case; return its outcome, or what is wrong."""
        index = request.get("index")
        case = request["case"] if index is None else case_of(self.target, self.seed, index)
        start = cpu_seconds()
        try:
            outcome, error = self.runner.run(case), None
        except BaseException as fault:  # a panic of Rust is one, too
            outcome, error = "", "".join(traceback.format_exception(fault))
        seconds = cpu_seconds() - start
        if error is None and seconds > self.limits.cpu_seconds:
            error = f"Slow: {seconds:.1f} s of CPU time"
        error = error or self._leak()
        return {"outcome": outcome, "error": error, "seconds": seconds}

    def _leak(self) -> str | None:
        self.count += 1
        if peak_bytes() > self.max_peak:
            return f"Memory: {peak_bytes() >> 20} MiB"
        if self.count % CHECK_EVERY == 0:
            gc.collect()
            files = len(os.listdir("/proc/self/fd"))
            self.num_files = self.num_files or files
            if files > self.num_files + MAX_NEW_FILES:
                return f"Leak: {files} open files after {self.count} cases; {self.num_files} before"
        return None


def _limit_memory(more: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> None:
    """Serve the driver until it closes the pipe."""
    target, seed = sys.argv[1], int(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the engine prints is not an answer
    warnings.simplefilter("ignore")
    folder = Path(tempfile.mkdtemp(prefix=f"fuzz-{target}-"))
    home = os.getcwd()
    try:
        os.chdir(folder)
        worker = _Worker(target, seed, folder)
        print(json.dumps({"folder": str(folder)}), file=answers)
        for line in sys.stdin:
            print(json.dumps(worker.answer(json.loads(line))), file=answers)
    finally:
        os.chdir(home)
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
