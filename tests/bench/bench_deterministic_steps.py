"""Cost of `deterministic=True` in a model: decode steps of 1 to 256 requests, and prompts.

Each model is loaded in one mode after the other. A row has the figures of both modes and what the
mode costs in percent. Requests have equal lengths; with many, the time per token includes the steps
in which the last prompts are computed.
"""

from __future__ import annotations

import gc

from engine import load
from engine.commands._bench_models import built_in_config
from engine.commands._bench_workloads import Work, latency, prefill
from engine.llm_engine import LLMEngine

# Model and quantization, numbers of requests, and tokens of a prompt, generated and in prompts.
_MODELS = {
    "cuda": (
        ("qwen3-0.6b", None),
        ("llama-3.1-8b", None),
        ("llama-3.1-8b", "fp8"),
        ("llama-3.1-8b", "int4"),
    ),
    "cpu": (("qwen2.5-0.5b", None),),
}
_REQUESTS = {"cuda": (1, 16, 64, 256), "cpu": (1, 4)}
_LENGTHS = {"cuda": (128, 128), "cpu": (8, 4)}
_PROMPTS = {"cuda": (16, 2048), "cpu": (2, 32)}
_REPEATS = 2


def _figures(name, form, device, *, deterministic):
    """Return the ms per token by number of requests, and the us per prompt token."""
    kind = device.kind
    model = load(
        config=built_in_config(name),
        load_format="dummy",
        quantization=form,
        max_model_len=4096 if device.is_cuda else 64,
        device=str(device),
        deterministic=deterministic,
    )
    found = {}
    with LLMEngine(model, max_num_seqs=max(_REQUESTS[kind])) as engine:
        for count in _REQUESTS[kind]:
            row = latency(engine, Work.same(count, *_LENGTHS[kind]), _REPEATS)
            found[f"{count} requests, ms per token"] = row["ms_per_token"]
        count, length = _PROMPTS[kind]
        rate = prefill(engine, Work.same(count, length, 1), _REPEATS)["prompt_tokens_per_s"]
        found[f"{count} prompts of {length}, us per token"] = 1e6 / rate
    model.close()
    gc.collect()
    return found


def main(device):
    """Measure, print, and return the rows."""
    rows = []
    for name, form in _MODELS[device.kind]:
        default, fixed = (
            _figures(name, form, device, deterministic=mode) for mode in (False, True)
        )
        for case, figure in default.items():
            row = {"op": "deterministic_steps", "case": f"{name} {form or ''}".strip() + f" {case}"}
            row |= {"default": figure, "deterministic": fixed[case]}
            row["cost %"] = 100 * (fixed[case] / figure - 1)
            rows.append(row)
            print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else v for k, v in row.items()))
    return rows
