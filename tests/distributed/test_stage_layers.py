"""Pipeline stages with layers of different kinds: what limits one of them limits the engine."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from engine import SamplingParams
from engine.errors import ConfigError, RequestError
from tests.distributed.engines import CONFIG, add_every_kind_of_request, make_engine, run
from tests.distributed.golden import write_checkpoint
from tests.distributed.test_states import serve
from tests.e2e.test_layer_kinds import ROOM

LAST_ALONE = {"pipeline_parallel_size": 2, "pipeline_layers": (4, 1)}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 6, "adaptive": False}


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """A model of five layers: mamba2, experts, attention, experts, and an MLP."""
    folder = write_checkpoint("nemotron_h_experts", tmp_path_factory.mktemp("hybrid"))
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | ROOM))
    return str(folder)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_last_stage_without_pages_and_states(in_threads, hybrid, mode):
    alone, stats, *_ = serve(hybrid, preemption_mode=mode)
    found, *_ = serve(hybrid, preemption_mode=mode, **LAST_ALONE)
    assert found == alone and stats.num_preemptions > 0


def test_a_closed_stage_without_caches_serves_no_more(in_threads, hybrid):
    engine = make_engine(model=hybrid, **LAST_ALONE)
    engine.close()
    assert engine.model.group.is_closing
    with pytest.raises(RequestError, match="the engine was closed"):
        engine.add_request("late", [1, 2])


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_recurrent_layers_before_the_last_stage_limit_drafts(in_threads, hybrid, method):
    options = {"model": hybrid, "pipeline_parallel_size": 2, "pipeline_layers": (2, 3)}
    drafts = {"method": method}
    with make_engine(**options, speculative_config=drafts) as engine:
        assert engine.scheduler.config.max_draft_tokens == 7
        add_every_kind_of_request(engine)
        assert run(engine)
    drafts |= {"num_speculative_tokens": 9}
    with pytest.raises(ConfigError, match=r"num_speculative_tokens must be at most 7 for a model"):
        make_engine(**options, speculative_config=drafts)
    with pytest.raises(ConfigError, match=r"state_dtype must be 'auto' or 'float32' with determ"):
        make_engine(**options, state_dtype="bfloat16")


@pytest.mark.parametrize("reach", ["layer_windows", "layer_chunks"])
def test_windows_and_chunks_before_the_last_stage_exclude_trees(in_threads, reach):
    config = replace(CONFIG, num_layers=3, **{reach: (8, 8, 0)})
    options = {"config": config, "deterministic": False, "speculative_config": SUFFIX}
    stages = {"pipeline_parallel_size": 2, "pipeline_layers": (2, 1)}
    with make_engine(**options, **stages) as engine:
        for index in range(3):
            prompt = [4, 5, 6, 7, 4, 5, 8, 9, 4, 5, 6, 7, 4, 5, 8] * 3 + [index, 4, 5]
            params = SamplingParams(
                max_tokens=40,
                temperature=2.0,
                seed=index,
                ignore_eos=True,
                allowed_token_ids=[4, 5, 6, 8],
            )
            engine.add_request(str(index), prompt, params)
        assert len(run(engine)) == 3
        assert engine.stats().speculation.num_draft_tokens > 0


def test_chunks_before_the_last_stage_exclude_pages_of_codes(in_threads):
    config = replace(CONFIG, num_layers=3, layer_chunks=(8, 8, 0))
    stages = {"pipeline_parallel_size": 2, "pipeline_layers": (2, 1)}
    with pytest.raises(ConfigError, match="kv_cache_dtype must be 'auto' with an attention_patt"):
        make_engine(config=config, **stages, kv_cache_dtype="fp8")
