"""From the start of a process to its first token: what `engine bench startup` runs in new ones."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

__all__ = ["child", "measure"]


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Start a process with an empty kernel cache, and one with the cache that this one filled."""
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        for kernels in ("cold", "warm"):
            command = [sys.executable, "-m", "engine", "bench", "startup", "--in-child"]
            command += ["--model", arguments.model, "--device", arguments.device]
            command += ["--dtype", arguments.dtype, "--load-format", arguments.load_format]
            start = time.time()
            done = subprocess.run(
                command,
                env={**os.environ, "ENGINE_CACHE_DIR": cache} if kernels else None,
                stdout=subprocess.PIPE,
                check=False,
            )
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}")
            stations = json.loads(done.stdout.splitlines()[-1])
            row: dict[str, Any] = {"kernel_cache": kernels}
            for name, moment in stations.items():
                row[f"{name}_s"] = moment - start
            rows.append(row)
    return rows


def child(arguments: argparse.Namespace) -> None:
    """Print when each station was passed, in seconds of the clock, as one line of JSON."""
    stations = {"imported": time.time()}
    from engine.commands._bench_models import make_engine
    from engine.commands._bench_workloads import Work, serve

    engine = make_engine(arguments, max_model_len=2048, max_num_seqs=256)
    stations["ready"] = time.time()
    serve(engine, Work.same(1, 16, 1, max_id=engine.model.config.vocab_size - 1))
    stations["first_token"] = time.time()
    print(json.dumps(stations))
