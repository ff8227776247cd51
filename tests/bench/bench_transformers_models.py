"""Models of transformers on our kernels beside sdpa: time of training steps and of decoding.

A Llama of 1B parameters' sizes with four layers, in bfloat16, called as transformers calls it: no
torch.compile. The training rows first compare the logits. On a CPU the sizes are tiny, to try the
script.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
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


def main(device: Any) -> list[dict[str, Any]]:
    """Measure, print, and return a row for each case: milliseconds by implementation."""
    (name, sizes) = ("cuda", Sizes()) if device.is_cuda else ("cpu", TINY)
    integration.register()
    models = build(sizes, name)
    rows = []
    for case, times in itertools.chain(
        training_times(models, sizes, name), decoding_times(models, sizes, name)
    ):
        print(f"{case:32}" + "".join(f"{i} {times[i]:9.3f} ms  " for i in IMPLEMENTATIONS))
        rows.append({"case": case, **{f"{i} ms": times[i] for i in IMPLEMENTATIONS}})
    return rows


Times = Iterator[tuple[str, dict[str, float]]]


def training_times(models: dict[str, Any], sizes: Sizes, device: str) -> Times:
    """Yield the name of each kind of batch, and milliseconds by implementation."""
    for name, (ids, kwargs) in training_cases(sizes, device).items():
        compare(models, ids, kwargs)
        steps = {i: partial(train, models[i].train(), ids, kwargs) for i in IMPLEMENTATIONS}
        yield f"train, {name}", {i: milliseconds(step, device) for i, step in steps.items()}


def decoding_times(models: dict[str, Any], sizes: Sizes, device: str) -> Times:
    """Yield the name of each kind of cache, and milliseconds a token by implementation."""
    ids = torch.randint(1, 8192, (sizes.decode_batch, sizes.tokens // 2), device=device)
    mask = torch.ones_like(ids)
    mask[0, : sizes.tokens // 8] = 0
    for cache in ("dynamic", "static"):
        times = {}
        for i in IMPLEMENTATIONS:
            first, whole = (
                milliseconds(partial(decode, models[i].eval(), ids, mask, n, cache), device)
                for n in (1, 1 + sizes.new_tokens)
            )
            times[i] = (whole - first) / sizes.new_tokens
        yield f"decode a token, {cache} cache", times
