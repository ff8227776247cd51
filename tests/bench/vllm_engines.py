"""vLLM with our attention beside its FlashAttention: two engines in one process, one GPU.

    python -m tests.bench.vllm_engines MODEL [--json FILE] [--layers N] [--backends A,B]

MODEL is a folder with config.json; the weights are random, and large enough that attention decides
the result. First the log-probabilities of prompts in mixed, chunked batches and the greedy tokens
behind them are compared, then decoding (ms a step, from a CUDA graph) and prefill (s) are timed,
the engines in turn. No torch.compile: both engines run the same model code.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from random import Random
from statistics import mean, stdev
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # before vLLM is imported

import torch
from vllm import LLM, SamplingParams

from engine.integrations.vllm import register

_DECODE = ((1, 1024), (16, 1024), (64, 1024), (256, 512))  # requests, tokens of each prompt
_PREFILL = (8, 4096)
_STEPS = 48
_MIXED = (5, 700, 33, 130, 64, 2000, 1, 300)  # lengths of prompts


def build(model: str, backend: str, layers: int, share: float) -> LLM:
    """Return an engine; `share` is its part of the GPU's memory."""
    engine = LLM(
        model=model,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        attention_backend=backend,
        enable_prefix_caching=False,
        max_model_len=4224,
        max_num_batched_tokens=8192,
        gpu_memory_utilization=share,
        hf_overrides={"num_hidden_layers": layers} if layers else {},
        compilation_config={
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [batch for batch, _ in _DECODE],
        },
        seed=0,
    )
    engine.apply_model(draw_weights)
    return engine


def draw_weights(model: torch.nn.Module) -> None:
    """Write random weights; vLLM's own are so small that a layer adds next to nothing."""
    generator = torch.Generator("cuda").manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data.fill_(1.0)
        else:
            parameter.data.normal_(0.0, 0.02, generator=generator)


def generate(engine: LLM, prompts: list[list[int]], count: int) -> tuple[float, list[Any]]:
    """Return the seconds, and each prompt's new tokens."""
    options = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    found = engine.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], options, use_tqdm=False
    )
    return time.perf_counter() - start, [list(each.outputs[0].token_ids) for each in found]


def prompts_of(lengths: list[int]) -> list[list[int]]:
    rng = Random(0)
    return [[rng.randint(0, 8999) for _ in range(length)] for length in lengths]


def step_ms(engine: LLM, batch: int, length: int) -> float:
    prompts = prompts_of([length] * batch)
    first, whole = (generate(engine, prompts, count)[0] for count in (1, 1 + _STEPS))
    return 1e3 * (whole - first) / _STEPS


def answers(engine: LLM) -> tuple[list[float], list[list[int]]]:
    """Return the log-probability of each token of the prompts, and the greedy tokens."""
    options = SamplingParams(
        temperature=0.0, max_tokens=32, ignore_eos=True, detokenize=False, prompt_logprobs=0
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in prompts_of([*_MIXED])]
    found = engine.generate(prompts, options, use_tqdm=False)
    logprobs = [
        next(iter(place.values())).logprob for each in found for place in each.prompt_logprobs[1:]
    ]
    return logprobs, [list(each.outputs[0].token_ids) for each in found]


def compared(first: Any, second: Any) -> dict[str, Any]:
    """Return how far the log-probabilities differ, and how many first tokens are equal."""
    differences = [abs(a - b) for a, b in zip(first[0], second[0], strict=True)]
    equal = []
    for ours, theirs in zip(first[1], second[1], strict=True):
        differ = [a != b for a, b in zip(ours, theirs, strict=True)]
        equal.append([*differ, True].index(True))
    return {
        "log-probabilities, largest difference": max(differences),
        "mean difference": mean(differences),
        "standard deviation": stdev(second[0]),
        "equal tokens of 32": equal,
    }


def main(argv: list[str] | None = None) -> None:
    """Print one JSON line per case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--backends", default="CUSTOM,FLASH_ATTN")
    options = parser.parse_args(argv)
    register()
    # Both stay alive: torch 2.11 cannot capture in a pool whose graphs are all gone.
    names = options.backends.split(",")
    engines = {name: build(options.model, name, options.layers, 0.4) for name in names}
    found = compared(*(answers(engine) for engine in engines.values()))
    rows: list[dict[str, Any]] = [{"case": f"prompts of {_MIXED}", **found}]
    for _ in range(2):  # the first round warms up
        del rows[1:]
        for batch, length in _DECODE:
            times = {name: step_ms(engine, batch, length) for name, engine in engines.items()}
            rows.append({"case": f"decode {batch} x {length}, ms", **times})
        whole = prompts_of([_PREFILL[1]] * _PREFILL[0])
        times = {name: generate(engine, whole, 1)[0] for name, engine in engines.items()}
        rows.append({"case": f"prefill {_PREFILL[0]} x {_PREFILL[1]}, s", **times})
    for row in rows:
        print(json.dumps(row), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
