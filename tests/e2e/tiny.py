"""A tiny random model, engines around it, and the tokens that a request gets alone."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools

import numpy as np
import pytest

from engine import LLM, LLMEngine, SamplingParams, device, load
from engine.config import GatedDeltaConfig, ModelConfig, RopeConfig
from engine.core.input_processor import InputProcessor
from engine.sampling_params import RequestOutputKind
from engine.shared_engine import SharedEngine

VOCAB = 97
EOS = 3
CONFIG = ModelConfig(
    model_type="llama",
    vocab_size=VOCAB,
    hidden_size=48,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=64,
    max_position_embeddings=256,
    rope=RopeConfig(rotary_dim=8),
    eos_token_ids=(EOS,),
)
HYBRID = dataclasses.replace(
    CONFIG,
    num_layers=3,
    layer_kinds=("gated_delta", "attention", "gated_delta"),
    gated_delta=GatedDeltaConfig(2, 4, 8, 16),
)
BYTES_PER_BLOCK = 2 * 2 * 2 * 8 * 4 * 16  # blocks of 16 tokens


def tiny_model(where="cpu", config=CONFIG, *, deterministic=False):
    """Load the model in float32; skip if a GPU is needed and there is none."""
    if where == "cuda" and not device.resolve_device("auto")[0].is_cuda:
        pytest.skip("no GPU")
    return load(
        config=config,
        load_format="dummy",
        device=where,
        dtype="float32",
        deterministic=deterministic,
    )


def make_engine(model, **options):
    """Make a small engine that checks its integrity after each step."""
    defaults = {"max_num_seqs": 4, "max_num_batched_tokens": 24, "num_blocks": 64, "debug": True}
    return LLMEngine(model, **(defaults | options))


@contextlib.contextmanager
def freed_pools(*owners):
    """Check that an engine's (or draft model's) pages and graphs return to the device.

    Scratch that was first used when graphs were captured stays.
    """
    pages = [owner.kv_cache.pool._cuda_pool for owner in owners]
    graphs = [owner.runner.graphs._pool for owner in owners]
    before = [pool.total_bytes() for pool in (*pages, *graphs)]
    yield
    assert 0 not in before
    assert [pool.total_bytes() for pool in pages] == [0] * len(owners)
    kept = before[len(pages) :]
    assert all(pool.total_bytes() < size for pool, size in zip(graphs, kept, strict=True))


def mixed_params(index, **more):
    """Greedy, and three ways of random sampling in turn, without an end of sequence."""
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.8, "seed": index},
        {"temperature": 1.0, "seed": index, "top_k": 7},
        {"temperature": 0.6, "seed": index, "top_p": 0.8, "min_p": 0.02},
    ]
    return SamplingParams(**({"ignore_eos": True} | kinds[index % 4] | more))


def swap_gb(num_blocks, block_size=16):
    """Return the `swap_space_gb` for this many blocks."""
    return (num_blocks + 0.5) * BYTES_PER_BLOCK * (block_size // 16) / 2**30


def make_llm(model, **options):
    """Make an `LLM` around such an engine, without loading files."""
    llm = LLM.__new__(LLM)
    llm._shared, llm._counter = SharedEngine(make_engine(model, **options)), itertools.count()
    return llm


def run(engine, max_steps=5000, num_failures=0):
    """Step until nothing is left; return the last output of each request."""
    last = {}
    for _ in range(max_steps):
        if not engine.has_unfinished_requests():
            check_drained(engine, num_failures)
            return last
        last.update((output.request_id, output) for output in engine.step())
        engine.check_integrity()
    raise AssertionError(f"not drained after {max_steps} steps")


def check_drained(engine, num_failures=0):
    """Check that after the last request nothing is held."""
    assert engine.stats().num_step_failures == num_failures
    assert engine.scheduler.blocks.num_available == engine.config.scheduler.num_blocks
    stats = engine.scheduler.stats()
    assert stats.num_requests_running == stats.num_requests_waiting == 0
    assert not engine._streams.groups and not len(engine.runner._table)
    assert not engine._recovery.num_suspects


def generate(model, prompt, params=None, **options):
    """Return the output of one request in a new engine."""
    engine = make_engine(model, **options)
    engine.add_request("r", prompt, params or SamplingParams())
    return run(engine)["r"]


def alone(model, prompt, params):
    """Return the token ids of each continuation, computed one by one without sharing."""
    inputs = InputProcessor(model, None, max_model_len=256)
    options = {"max_num_seqs": 1, "max_num_batched_tokens": 256, "enable_prefix_caching": False}
    options["cuda_graphs"] = False
    ids = []
    for spec in inputs.sampling_specs(params):
        one = dataclasses.replace(
            params, n=1, best_of=None, seed=spec.seed, output_kind=RequestOutputKind.FINAL_ONLY
        )
        output = generate(model, prompt, one, async_scheduling=False, **options)
        ids.append(list(output.outputs[0].token_ids))
    return ids


def greedy_alone(model, prompt, count, eos=True):
    """Decode with `Model.step`: independent of scheduler, block tables and chunks."""
    cache = model.new_cache(1, len(prompt) + count)
    logits = model.step(np.array([prompt]), cache)
    ids = []
    while len(ids) < count:
        ids.append(int(logits[0].argmax()))
        if eos and ids[-1] == EOS:
            break
        if len(ids) < count:
            logits = model.step(np.array([ids[-1:]]), cache)
    return ids


class Words:
    """A tokenizer with one word per id, as far as the engine needs one."""

    special_ids = frozenset({EOS})
    strip_left = 0
    max_token_chars = 4
    eos_token_ids = (EOS,)

    def encode(self, text, add_special_tokens=True):
        words = text.split()
        return [int(word.removeprefix("w")) for word in words]

    def decode(self, ids, skip_special_tokens=True):
        return "".join(self.token_bytes(i).decode() for i in ids if i != EOS)

    def token_bytes(self, token_id):
        return b"w%d " % token_id
