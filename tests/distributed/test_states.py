"""Recurrent states over several processes: each holds the slots of its own heads or layers."""

from __future__ import annotations

import json

import pytest

from engine import SamplingParams
from tests.distributed.engines import make_engine
from tests.distributed.golden import write_checkpoint
from tests.e2e.test_layer_kinds import ROOM, prompt

HEAD = prompt(0, 70)
PROMPTS = [HEAD + prompt(1, 9), HEAD + prompt(2, 30), prompt(3, 3), HEAD[:64], [*HEAD, 5]]
OPTIONS = {"num_blocks": 14, "swap_space_gb": 1e-3, "preemption_mode": "swap", "debug": True}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "adaptive": False}


@pytest.fixture(
    scope="module", params=["qwen3_next", "nemotron_h", "kimi_linear", "bailing_moe_v2_5"]
)
def folder(request, tmp_path_factory):
    """A golden model, with room for long sequences."""
    folder = write_checkpoint(request.param, tmp_path_factory.mktemp(request.param))
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | ROOM))
    return str(folder)


def serve(folder, **options):
    """Serve all prompts twice; return the outputs, and the counters of the scheduler."""
    engine = make_engine(model=folder, **(OPTIONS | options))
    try:
        found = {}
        for turn in range(2):
            for index, ids in enumerate(PROMPTS):
                params = SamplingParams(max_tokens=20 + index, temperature=0.0, ignore_eos=True)
                engine.add_request(f"{turn} {index}", ids, params)
            while engine.has_unfinished_requests():
                for output in engine.step():
                    if output.finished:
                        found[output.request_id] = list(output.outputs[0].token_ids)
                engine.check_integrity()
        num_accepted = engine.stats().speculation.num_accepted_tokens
        return found, engine.scheduler.stats(), engine.kv_cache.num_slots, num_accepted
    finally:
        engine.close()


@pytest.fixture(scope="module")
def alone(folder):
    """What a single process computes."""
    return serve(folder)


@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 2, "async_scheduling": True},
        {"pipeline_parallel_size": 2},
        {"pipeline_parallel_size": 2, "preemption_mode": "recompute"},
        {"pipeline_parallel_size": 2, "speculative_config": NGRAM},
    ],
    ids=str,
)
def test_tokens_are_those_of_one_process(folder, alone, options):
    if "nemotron_h" in folder and "tensor_parallel_size" in options:
        pytest.skip("its three groups of heads cannot be divided by two")
    found, stats, num_slots, num_accepted = serve(folder, **options)
    assert found == alone[0]
    assert (num_accepted > 0) == ("speculative_config" in options)
    assert num_slots == stats.num_state_slots > 4 and stats.num_taken_snapshots > 0
    assert stats.num_preemptions > 0 and stats.prefix_cache_hits > 0
    if options.get("preemption_mode") != "recompute":
        assert stats.num_swaps > 0
