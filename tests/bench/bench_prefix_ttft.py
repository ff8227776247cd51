"""32 requests sharing 2,000 tokens: prefill saved and time to first token with the prefix tree.

The requests arrive together, and each adds 32 tokens of its own. Random weights: Qwen3-0.6B's shape
on a GPU, a small model on the CPU.
"""

from __future__ import annotations

import statistics

import numpy as np

from engine import LLMEngine, SamplingParams, load
from engine.commands._bench_models import built_in_config
from engine.config import ModelConfig, RopeConfig

_NUM_REQUESTS, _COMMON, _OWN = 32, 2000, 32
_SMALL = ModelConfig(
    model_type="llama",
    vocab_size=2048,
    hidden_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    intermediate_size=384,
    max_position_embeddings=4096,
    rope=RopeConfig(rotary_dim=32),
)


def _load(device):
    if device.is_cuda:
        config = built_in_config("qwen3-0.6b")
        return load(config=config, device="cuda", load_format="dummy", max_model_len=2560)
    return load(config=_SMALL, device="cpu", load_format="dummy", max_model_len=2560)


def _serve(engine, rng):
    """Serve one burst of requests whose prefix is not cached; return its metrics."""
    common = rng.integers(0, 2000, _COMMON).tolist()
    params = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0)
    for index in range(_NUM_REQUESTS):
        engine.add_request(str(index), common + rng.integers(0, 2000, _OWN).tolist(), params)
    last = {}
    while engine.has_unfinished_requests():
        last.update((o.request_id, o) for o in engine.step())
    assert all(len(o.outputs[0].token_ids) == 4 for o in last.values())
    return [o.metrics for o in last.values()]


def _row(model, *, caching, rng):
    engine = LLMEngine(
        model,
        max_num_seqs=_NUM_REQUESTS,
        enable_prefix_caching=caching,
        max_num_batched_tokens=2048,
        cuda_graphs=False,  # only prefill is measured
    )
    runs = [_serve(engine, rng) for _ in range(3 if model.device.is_cuda else 1)]
    engine.close()
    metrics = min(runs, key=lambda ms: max(m.ttft for m in ms))  # the first run is warm-up
    cached = sum(m.num_cached_tokens for m in metrics)
    whole = (_COMMON // 16) * 16
    assert cached == (_NUM_REQUESTS - 1) * whole * caching
    ttft = sorted(m.ttft * 1e3 for m in metrics)
    return {
        "op": "prefix_ttft",
        "case": f"{_NUM_REQUESTS} requests, {_COMMON} common tokens, tree {caching}",
        "prompt tokens computed": _NUM_REQUESTS * (_COMMON + _OWN) - cached,
        "ttft first ms": ttft[0],
        "ttft mean ms": statistics.mean(ttft),
        "ttft last ms": ttft[-1],
    }


def main(device):
    """Measure, print, and return the rows."""
    model, rng = _load(device), np.random.default_rng(0)
    rows = [_row(model, caching=caching, rng=rng) for caching in (False, True)]
    for row in rows:
        print(
            "  ".join(
                f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()
            )
        )
    return rows
