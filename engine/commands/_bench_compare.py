"""Benchmark of Hugging Face transformers: batch 1, static cache, the same model and workload.

PyTorch is not a dependency; only this comparison imports it.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import statistics
import time
from typing import Any

from engine.commands._bench_models import built_in_names, config_folder
from engine.commands._bench_workloads import Work
from engine.errors import ConfigError
from engine.loading.download import resolve_model

__all__ = ["check", "transformers_latency"]


def check(arguments: argparse.Namespace) -> None:
    """Check that the comparison can run, before measuring anything.

    Raises
    ------
    ConfigError
        If PyTorch or transformers is not installed, or cannot run the chosen model.
    """
    for name in ("torch", "transformers"):
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"--compare needs {name}, which is not installed")
    if arguments.num_requests not in (None, 1):
        raise ConfigError(f"--compare needs --num-requests 1; got {arguments.num_requests}")
    if arguments.model in built_in_names():
        return
    source = resolve_model(arguments.model)
    if source.kind != "hf_dir":
        raise ConfigError(
            f"--compare needs a built-in configuration or a model that transformers reads; "
            f"got {arguments.model}"
        )


def transformers_latency(
    arguments: argparse.Namespace,
    work: Work,
    repeats: int,
    *,
    dtype: str,
    device: str,
) -> dict[str, Any]:
    """Return milliseconds per token of `generate` with a static cache, excluding prefill.

    The dtype and device are the engine's; call `check` first.

    Raises
    ------
    ConfigError
        If the engine ran on a GPU but PyTorch cannot.
    """
    torch, transformers = map(importlib.import_module, ("torch", "transformers"))
    if device != "cpu" and not torch.cuda.is_available():
        raise ConfigError(f"--compare needs a PyTorch with CUDA for {device}; this one has none")
    model = _model(torch, transformers, arguments, dtype).to(device).eval()
    prompt = torch.tensor([work.prompts[0]], device=device)

    def seconds(num_tokens: int) -> float:
        start = time.perf_counter()
        model.generate(
            prompt,
            do_sample=False,
            min_new_tokens=num_tokens,
            max_new_tokens=num_tokens,
            cache_implementation="static",
            pad_token_id=0,
        )
        if device != "cpu":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    count = work.lengths[0]
    for _ in range(2):
        seconds(count)  # warm up: the first run compiles
    spans = [seconds(count) - seconds(1) for _ in range(repeats)]
    return {
        "what": f"transformers {transformers.__version__}, static cache",
        "dtype": dtype,
        "ms_per_token": statistics.median(spans) / max(1, count - 1) * 1e3,
    }


def _model(torch: Any, transformers: Any, arguments: argparse.Namespace, dtype: str) -> Any:
    name = arguments.model
    kind = getattr(torch, dtype)
    if name not in built_in_names():
        path = resolve_model(name).path
        return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=kind)
    fields = json.loads((config_folder(name) / "config.json").read_text())
    config = transformers.AutoConfig.for_model(**fields)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=kind)
