"""`engine bench startup`: time from process start to the first token."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

from engine.errors import EngineError

__all__ = ["child", "measure"]


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Time one process with a cold kernel cache and a second one with a warm cache.

    Raises
    ------
    EngineError
        If the model is unknown, or a measured process fails.
    """
    command = _command(arguments)
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        for kernels in ("cold", "warm"):
            start = time.time()
            done = subprocess.run(
                command,
                env={**os.environ, "ENGINE_CACHE_DIR": cache},
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
                raise EngineError(f"the measured process failed: {lines[-1]}")
            stations = json.loads(done.stdout.splitlines()[-1])
            row: dict[str, Any] = {"kernel_cache": kernels}
            for name, moment in stations.items():
                row[f"{name}_s"] = moment - start
            rows.append(row)
    return rows


def _command(arguments: argparse.Namespace) -> list[str]:
    """Return the command to measure; a local model is given by its path.

    The measured process starts with an empty cache, so it could not find a download by name.
    """
    # Imported lazily: a child process times the import of the engine itself.
    from engine.commands._bench_models import built_in_names
    from engine.commands._parallel import PARALLEL_OPTIONS
    from engine.loading.download import resolve_model

    model = arguments.model
    if model not in built_in_names():
        model = os.fspath(resolve_model(model))
    command = [sys.executable, "-m", "engine", "bench", "startup", "--in-child"]
    names = ("device", "dtype", "load_format", "quantization", "kv_cache_dtype", "max_num_seqs")
    more = ("max_num_batched_tokens", "speculative_config", *PARALLEL_OPTIONS, "pipeline_layers")
    for name in (*names, *more):
        if (value := getattr(arguments, name)) is not None:
            command.append(f"--{name.replace('_', '-')}={value}")
    for name in ("kernels", "logits_processors"):
        command += [f"--{name.replace('_', '-')}={one}" for one in getattr(arguments, name) or ()]
    flags = ("no-cuda-graphs", "no-async", "enable-expert-parallel")
    command += [f"--{name}" for name in flags if _is_set(arguments, name)]
    return [*command, f"--model={model}"]


def _is_set(arguments: argparse.Namespace, name: str) -> bool:
    return bool(getattr(arguments, name.replace("-", "_")))


def child(arguments: argparse.Namespace) -> None:
    """Print the wall-clock time of each stage, in seconds, as one line of JSON."""
    stations = {"imported": time.time()}
    # Imported lazily: this import is part of the measured time.
    from engine.commands._bench_models import make_engine
    from engine.commands._bench_workloads import Work, serve

    engine = make_engine(arguments, max_model_len=None, max_num_seqs=256)
    stations["ready"] = time.time()
    serve(engine, Work.same(1, 16, 1, max_id=engine.model.config.vocab_size - 1))
    stations["first_token"] = time.time()
    print(json.dumps(stations))
