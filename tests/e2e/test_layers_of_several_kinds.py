"""The engine on Gemma 4 and 3n: shared pages, pages of two shapes, per-layer inputs, streams."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from safetensors.numpy import save_file

import engine
from engine.llm_engine import LLMEngine
from engine.sampling_params import SamplingParams

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = ("gemma4", "gemma4_keys_as_values", "gemma4_experts", "gemma3n")


@pytest.fixture(scope="module", params=CASES)
def model_and_record(request, tmp_path_factory):
    """A golden model, and its record: prompt and greedy tokens of transformers."""
    spec = importlib.util.spec_from_file_location("tiny_weights", GOLDEN / "tiny_weights.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    record = json.loads((GOLDEN / "models" / f"{request.param}.json").read_text())
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "config.json").write_text(json.dumps(record["config"]))
    mean = record["norm_mean"]
    tensors = {n: module.tiny_weight(n, s, mean) for n, s in record["tensors"].items()}
    save_file(tensors, folder / "model.safetensors")
    return engine.load(folder, device="cpu", dtype="float32", progress=False), record


@pytest.mark.parametrize(
    "options",
    [
        {},  # chunks of 24 tokens: a step may have no logits at all
        {"num_blocks": 8, "debug": True},  # room for two of three requests
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        {"enable_prefix_caching": False},
    ],
    ids=["chunks", "preemption", "drafts", "no_sharing"],
)
def test_greedy_tokens(model_and_record, options):
    model, record = model_and_record
    llm = LLMEngine(model, max_num_seqs=4, max_num_batched_tokens=24, **options)
    params = SamplingParams(temperature=0.0, max_tokens=len(record["greedy"]), ignore_eos=True)
    for index in range(3):
        llm.add_request(f"r{index}", record["prompt"], params)
    last = {}
    while llm.has_unfinished_requests():
        for output in llm.step():
            last[output.request_id] = output
        llm.scheduler.check_integrity()
    tokens = [list(output.outputs[0].token_ids) for output in last.values()]
    assert tokens == [record["greedy"]] * 3


def test_shared_layers_have_no_pages(model_and_record):
    model, _ = model_and_record
    config = model.config
    own = [layer for layer in range(config.num_layers) if config.kv_source(layer) == layer]
    sizes = [config.at(layer) for layer in own]
    cache = model.new_cache(1, 16)
    per_token = sum(2 * one.num_kv_heads * one.head_dim for one in sizes) * 4
    assert cache.kv.geometry.bytes_per_token == per_token
    for layer in range(config.num_layers):
        assert cache.pages[layer][0] is cache.pages[config.kv_source(layer)][0]
