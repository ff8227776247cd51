"""structured_streams: tokens per second of 256 requests, with and without a JSON schema each.

The requests of `engine bench throughput`, Qwen3-0.6B's shape with random weights, a synthetic
vocabulary of 151,936 tokens. A model with random weights writes strings that almost never end:
"string" keeps all requests in the same schema state, "short strings" puts each in its own.
"""

from __future__ import annotations

import statistics
import time
from unittest.mock import patch

from engine import load
from engine.commands._bench_models import built_in_config
from engine.commands._bench_workloads import Work
from engine.llm_engine import LLMEngine
from engine.sampling_params import RequestOutputKind, SamplingParams
from engine.structured.spec import StructuredOutput
from tests.bench.made_vocabulary import MadeTokenizer

_MODELS = {"cuda": ("qwen3-0.6b", 256, 1024), "cpu": ("qwen2.5-0.5b", 2, 16)}
_ROUNDS = 3
_ARRAY = {"type": "array", "minItems": 1000}  # exceeds the longest output
_SCHEMAS = {
    "plain": None,
    "string": _ARRAY | {"items": {"type": "string"}},
    "short strings": _ARRAY | {"items": {"type": "string", "maxLength": 24}},
}


def _tokens_per_second(engine, work, schema):
    structured = StructuredOutput(json=schema) if schema else None
    for index, (prompt, length) in enumerate(zip(work.prompts, work.lengths, strict=True)):
        params = SamplingParams(
            temperature=work.temperature,
            max_tokens=length,
            ignore_eos=True,
            structured=structured,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        engine.add_request(str(index), prompt, params)
    num_tokens, start = 0, time.perf_counter()
    while engine.has_unfinished_requests():
        for output in engine.step():
            num_tokens += output.metrics.num_generation_tokens
    # A text that ends early would shrink the batch and distort the figures.
    assert num_tokens > 0.99 * work.num_output_tokens, (num_tokens, work.num_output_tokens)
    return num_tokens / (time.perf_counter() - start)


def main(device):
    """Measure all cases interleaved, print, and return the rows."""
    name, count, longest = _MODELS[device.kind]
    config = built_in_config(name)
    model = load(config=config, load_format="dummy", max_model_len=2048, device=str(device))
    work, rates = Work.mixed(count, longest), {name: [] for name in _SCHEMAS}
    vocabulary = {"tokenizer": MadeTokenizer(), "has_tokenizer": True}
    with (
        patch.multiple(type(model), **vocabulary),
        LLMEngine(model, max_num_seqs=count, enable_prefix_caching=False) as engine,
    ):
        for _ in range(1 + _ROUNDS):  # the first round compiles
            for name, schema in _SCHEMAS.items():
                rates[name].append(_tokens_per_second(engine, work, schema))
                print(f"  {name}: {rates[name][-1]:.0f} tokens/s", flush=True)
    model.close()
    plain, rows = statistics.median(rates["plain"][1:]), []
    for name, found in rates.items():
        rate = statistics.median(found[1:])
        rows.append({"op": "structured_streams", "case": f"{name}, {count} requests"})
        rows[-1] |= {"tokens/s": rate, "x plain": rate / plain}
        print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else v for k, v in rows[-1].items()))
    return rows
