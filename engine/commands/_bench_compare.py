"""transformers beside the engine: batch 1, static cache, the same configuration and workload.

PyTorch is no dependency: it is imported by name, if it is there, and only for this comparison.
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

__all__ = ["transformers_latency"]


def transformers_latency(arguments: argparse.Namespace, work: Work, repeats: int) -> dict[str, Any]:
    """Return milliseconds a token of `generate` with a static cache, without the prefill.

    Raises
    ------
    ConfigError
        If PyTorch or transformers is not installed.
    """
    for name in ("torch", "transformers"):
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"--compare needs {name}, which is not installed")
    torch, transformers = map(importlib.import_module, ("torch", "transformers"))
    place = "cuda" if torch.cuda.is_available() and arguments.device != "cpu" else "cpu"
    model = _model(torch, transformers, arguments, place)
    prompt = torch.tensor([work.prompts[0]], device=place)

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
        if place == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    count = work.lengths[0]
    for _ in range(2):
        seconds(count)  # compiles
    spans = [seconds(count) - seconds(1) for _ in range(repeats)]
    return {
        "what": f"transformers {transformers.__version__}, static cache",
        "ms_per_token": statistics.median(spans) / max(1, count - 1) * 1e3,
    }


def _model(torch: Any, transformers: Any, arguments: argparse.Namespace, place: str) -> Any:
    dtype = torch.float32 if place == "cpu" else torch.bfloat16
    name = arguments.model
    if name in built_in_names():
        fields = json.loads((config_folder(name) / "config.json").read_text())
        config = transformers.AutoConfig.for_model(**fields)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    return model.to(place).eval()
