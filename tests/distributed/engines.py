"""Engines of several processes, and what tests ask of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from engine import LLMEngine, SamplingParams
from engine.config import ModelConfig, RopeConfig

CONFIG = ModelConfig("llama", 50, 64, 2, 8, 2, 16, 96, 256)
# The requests below, of 50 tokens and at least 10 more, outgrow its short factors.
LONGROPE = replace(
    CONFIG,
    rope=RopeConfig(
        rotary_dim=16,
        scaling="longrope",
        original_max_position=54,
        short_factor=(1.0,) * 8,
        long_factor=(9.0,) * 8,
    ),
)


def make_engine(config=CONFIG, **options):
    """Return an engine with random weights, or with those of `model`, on the CPU."""
    given = {"config": config, "load_format": "dummy", "device": "cpu", "deterministic": True}
    given |= {"num_blocks": 64, "max_num_seqs": 4, "collective_timeout": 20.0}
    model = options.pop("model", "dummy")
    if model != "dummy":
        del given["config"], given["load_format"]
    return LLMEngine.from_name(model, **(given | options))


def add_every_kind_of_request(engine):
    """Add greedy and random requests, with log-probabilities, penalties, masks, processors."""
    common = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]
    variants = [
        {"temperature": 0.0},
        {"temperature": 0.9, "seed": 5, "n": 3},
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 0.0, "prompt_logprobs": 1},
        {"temperature": 0.7, "seed": 1, "repetition_penalty": 1.3},
        {"temperature": 0.0, "allowed_token_ids": [1, 2, 3, 30]},
        {"temperature": 0.0, "logit_bias": {7: 4.0}},
        {"temperature": 0.0, "logits_processors": [lambda ids, row: np.roll(row, len(ids))]},
    ]
    for index, variant in enumerate(variants):
        params = SamplingParams(max_tokens=10 + index, ignore_eos=True, **variant)
        engine.add_request(f"r{index}", common[: 20 - index] + [index] * 30, params)


def run(engine):
    """Step until nothing is left; return everything that the outputs say."""
    found = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                found[output.request_id] = [
                    (o.index, o.token_ids, o.finish_reason, o.logprobs) for o in output.outputs
                ] + [output.prompt_logprobs]
        engine.check_integrity()
    return found


def is_alive(pid):
    """Tell whether a process runs; one that has ended but was not waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
