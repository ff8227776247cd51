"""Models of transformers on our kernels beside sdpa: training steps and decoding, one GPU.

    python -m tests.bench.transformers_models [--json FILE] [--device cpu]

A Llama of 1B parameters' sizes with four layers, in bfloat16, called as transformers calls it: no
torch.compile. Each row first compares the logits. On a CPU the sizes are tiny, to try the script.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from engine.integrations import transformers as integration

IMPLEMENTATIONS = ("engine", "sdpa")
REPEATS = 5


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model, and of the batches."""

    hidden: int = 2048
    heads: int = 32
    kv_heads: int = 8
    layers: int = 4
    batch: int = 2
    tokens: int = 4096
    decode_batch: int = 16
    new_tokens: int = 16


TINY = Sizes(hidden=64, heads=4, kv_heads=2, layers=1, tokens=64, decode_batch=2, new_tokens=3)


def build(sizes: Sizes, device: str) -> dict[str, Any]:
    """Return one model per implementation, with equal weights."""
    models = {}
    for implementation in IMPLEMENTATIONS:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            hidden_size=sizes.hidden,
            intermediate_size=4 * sizes.hidden,
            num_hidden_layers=sizes.layers,
            num_attention_heads=sizes.heads,
            num_key_value_heads=sizes.kv_heads,
            vocab_size=8192,
            max_position_embeddings=4 * sizes.tokens,
            pad_token_id=0,
            eos_token_id=None,
        )
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=implementation, dtype=torch.bfloat16
        )
        models[implementation] = model.to(device)
    return models


def training_cases(sizes: Sizes, device: str) -> dict[str, tuple[torch.Tensor, dict[str, Any]]]:
    """Return token ids and arguments: plain rows, padding on the left, packed sequences."""
    ids = torch.randint(1, 8192, (sizes.batch, sizes.tokens), device=device)
    padding = torch.ones_like(ids)
    padding[0, : sizes.tokens // 2] = 0
    sequences = 4 * sizes.batch
    positions = torch.arange(sizes.tokens // 4, device=device).repeat(sequences)[None]
    return {
        "rows": (ids, {}),
        "padding": (ids, {"attention_mask": padding}),
        "packed": (ids.reshape(1, -1), {"position_ids": positions}),
    }


def milliseconds(run: Callable[[], Any], device: str) -> float:
    """Return the median wall time, after two calls to warm up."""
    times = []
    for _ in range(REPEATS + 2):
        synchronise(device)
        start = time.perf_counter()
        run()
        synchronise(device)
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times[2:])


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def train(model: Any, ids: torch.Tensor, kwargs: dict[str, Any]) -> None:
    """Run one step without the optimizer."""
    model.zero_grad()
    model(ids, labels=ids, use_cache=False, **kwargs).loss.backward()


def compare(models: dict[str, Any], ids: torch.Tensor, kwargs: dict[str, Any]) -> None:
    """Raise an error if the implementations' logits differ by more than bfloat16 explains."""
    seen = kwargs.get("attention_mask", torch.ones_like(ids)).bool()
    with torch.no_grad():
        found, expected = (
            models[name](ids, use_cache=False, **kwargs).logits[seen].float()
            for name in IMPLEMENTATIONS
        )
    error = (found - expected).norm() / expected.norm()
    assert error < 2e-2, f"the logits differ by {error:.1e}"


def decode(model: Any, ids: torch.Tensor, mask: torch.Tensor, count: int, cache: str) -> None:
    model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        disable_compile=True,
        cache_implementation=None if cache == "dynamic" else cache,
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args(argv)
    device = options.device
    sizes = Sizes() if device == "cuda" else TINY
    integration.register()
    models = build(sizes, device)
    rows: dict[str, dict[str, float]] = {}
    for name, (ids, kwargs) in training_cases(sizes, device).items():
        compare(models, ids, kwargs)
        step = {i: _timed(train, models[i].train(), ids, kwargs) for i in IMPLEMENTATIONS}
        rows[f"train, {name}"] = {i: milliseconds(step[i], device) for i in IMPLEMENTATIONS}
    ids = torch.randint(1, 8192, (sizes.decode_batch, sizes.tokens // 2), device=device)
    mask = torch.ones_like(ids)
    mask[0, : sizes.tokens // 8] = 0
    for cache in ("dynamic", "static"):
        row = rows[f"decode a token, {cache} cache"] = {}
        for i in IMPLEMENTATIONS:
            calls = [
                milliseconds(_timed(decode, models[i].eval(), ids, mask, n, cache), device)
                for n in (1, 1 + sizes.new_tokens)
            ]
            row[i] = (calls[1] - calls[0]) / sizes.new_tokens
    for name, row in rows.items():
        print(f"{name:32}" + "".join(f"{i} {row[i]:9.3f} ms  " for i in IMPLEMENTATIONS))
    if options.json:
        card = torch.cuda.get_device_name() if device == "cuda" else "CPU"
        record = {"card": card, "sizes": asdict(sizes), "milliseconds": rows}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


def _timed(function: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    return lambda: function(*args)


if __name__ == "__main__":
    main()
