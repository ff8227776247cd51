"""Calls with wrong keywords: mypy must report each, or its `type: ignore` counts as unused.

Never run: mypy reads this file beside `engine/`.
"""

from __future__ import annotations

import engine


def right_keywords() -> engine.LLM:
    engine.load("smollm2", device="cpu", dtype="float32", quantization="int8")
    engine.AsyncEngine.from_name("smollm2", device="cuda:1", max_num_seqs=8)
    return engine.LLM("smollm2", device="cpu", gpu_memory_utilization=0.5, max_num_seqs=None)


def unknown_keywords() -> None:
    engine.LLM("smollm2", max_num_seq=8)  # type: ignore[call-arg]
    engine.LLMEngine.from_name("smollm2", devise="cpu")  # type: ignore[call-arg]
    engine.AsyncEngine.from_name("smollm2", devise="cpu")  # type: ignore[call-arg]
    engine.load("smollm2", max_num_seqs=8)  # type: ignore[arg-type]
    engine.SamplingParams(temprature=0.0)  # type: ignore[call-arg]


def wrong_types(model: engine.Model) -> None:
    engine.LLM("smollm2", block_size="16")  # type: ignore[arg-type]
    engine.LLM("smollm2", load_format="gguf")  # type: ignore[arg-type]
    engine.LLMEngine(model, device="cpu")  # type: ignore[call-arg]
    engine.SamplingParams(max_tokens=1.5)  # type: ignore[arg-type]
