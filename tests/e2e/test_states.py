"""The engine with recurrent layers: outputs are those of a request alone, whatever shares steps."""

from __future__ import annotations

import numpy as np
import pytest

from engine import LLMEngine, SamplingParams
from engine.cache.kv_cache import KVCache, KVGeometry
from engine.errors import ConfigError, OutOfMemoryError, RequestError
from tests.e2e.recurrent_mock import BYTES_PER_SLOT, RecurrentMock, register
from tests.e2e.tiny import HYBRID, tiny_model


@pytest.fixture
def model(monkeypatch):
    register(monkeypatch)
    return RecurrentMock()


def make_engine(model, **options):
    defaults = {"max_num_seqs": 4, "max_num_batched_tokens": 96, "num_blocks": 64, "debug": True}
    return LLMEngine(model, **(defaults | options))


def prompt(seed, length, vocab=64):
    return np.random.default_rng(seed).integers(0, vocab, length).tolist()


def drain(engine):
    done = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                done[output.request_id] = [list(each.token_ids) for each in output.outputs]
    return done


def serve(engine, prompts, max_tokens=20, **params):
    """Serve all prompts at once; return their outputs in order."""
    first = engine.collector.generation_tokens  # makes the ids of a second call others
    for index, ids in enumerate(prompts):
        options = {"temperature": 0.0, "ignore_eos": True, **params}
        given = SamplingParams(max_tokens=max_tokens, **options)
        engine.add_request(f"{first}-{index}", list(ids), given)
    done = drain(engine)
    return [done[f"{first}-{index}"] for index in range(len(prompts))]


def check(engine, model, prompts, max_tokens=20, **params):
    got = serve(engine, prompts, max_tokens, **params)
    for ids, outputs in zip(prompts, got, strict=True):
        assert outputs == [model.continuation(ids, max_tokens)] * len(outputs)


MODES = [
    {},
    {"async_scheduling": True},
    {"enable_prefix_caching": False},
    {"num_blocks": 14},  # preempts
    {"num_blocks": 14, "swap_space_gb": 1e-4, "preemption_mode": "swap"},
    {"num_blocks": 14, "swap_space_gb": 1e-4, "async_scheduling": True},
    {"max_num_batched_tokens": 7},
    {"block_size": 128},
    {"num_state_snapshots": 0},
    {"num_state_snapshots": 1, "state_snapshot_interval": 0},
]


@pytest.mark.parametrize("options", MODES, ids=str)
def test_outputs_are_those_of_a_request_alone(model, options):
    """Prompts with common beginnings, twice: the second time most of them are cached."""
    if options.get("block_size") == 128:
        options = {**options, "num_blocks": 8}
    head = prompt(0, 100)
    prompts = [head + prompt(i, 3 + 9 * i) for i in range(1, 7)] + [prompt(9, 1), head[:64]]
    with make_engine(model, **options) as engine:
        for _ in range(2):
            check(engine, model, prompts)
        stats = engine.scheduler.stats()
        if options.get("num_blocks") == 14:
            assert stats.num_preemptions > 0
        if options.get("preemption_mode") == "swap":
            assert stats.num_swaps > 0
        if options.get("num_state_snapshots", 2) > 1 and "enable_prefix_caching" not in options:
            assert stats.prefix_cache_hits > 0 and stats.num_taken_snapshots > 0


@pytest.mark.parametrize("is_async", [False, True])
def test_decode_graphs(model, is_async):
    """The kernels of graphs, launched one by one: padding and new slots go through their arrays."""
    prompts = [prompt(i, 50 + 7 * i) for i in range(3)]
    with make_engine(model, async_scheduling=is_async) as engine:
        engine.runner.capture_graphs(512)
        check(engine, model, prompts, 80)
        check(engine, model, prompts, 80)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("has_graphs", [False, True])
def test_drafts(model, is_async, has_graphs):
    """Each draft has a slot: the state goes on after the last one that was accepted."""
    num_wrong = 0

    def propose(token_ids, limit):
        nonlocal num_wrong
        ids = model.continuation(token_ids, limit)
        num_wrong += 1
        if num_wrong % 3:
            ids[num_wrong % limit] += 1
        return [token % 64 for token in ids]

    config = {"proposer": propose, "num_speculative_tokens": 3, "adaptive": False}
    prompts = [prompt(i, 60 + i) for i in range(4)]
    with make_engine(model, async_scheduling=is_async, speculative_config=config) as engine:
        if has_graphs:
            engine.runner.capture_graphs(512, 3)
        check(engine, model, prompts, 90)
        assert engine.speculation.stats().num_accepted_tokens > 100
        assert engine.scheduler.stats().num_taken_snapshots > 0
        continued = [ids + model.continuation(ids, 90) + [5] for ids in prompts]
        before = engine.scheduler.stats().prefix_cache_hits
        check(engine, model, continued, 8)
        # The end of each turn, at most a grid step and the drafts behind, is cached.
        assert engine.scheduler.stats().prefix_cache_hits - before >= 4 * (150 - 64) // 64 * 64


def test_a_turn_continues_where_the_last_one_ended(model):
    ids = prompt(1, 70)
    with make_engine(model) as engine:
        check(engine, model, [ids], 130)
        ids += model.continuation(ids, 130)
        before = engine.scheduler.stats().prefix_cache_hits
        check(engine, model, [[*ids, 1, 2]], 5)
        assert (
            engine.scheduler.stats().prefix_cache_hits - before == 192
        )  # three multiples of 64; 200 were computed


def test_known_prompts_part_at_a_snapshot(model):
    """The second prompt takes a snapshot where it parts from the first; the third one uses it."""
    head = prompt(0, 200)
    with make_engine(model) as engine:
        hits = []
        for index in range(1, 4):
            check(engine, model, [head + prompt(index, 100)], 2)
            hits.append(engine.scheduler.stats().prefix_cache_hits)
    assert hits == [0, 0, 192]


def test_a_long_prompt_takes_snapshots_along_its_way(model):
    head = prompt(0, 400)
    with make_engine(model, state_snapshot_interval=128, num_state_snapshots=8) as engine:
        check(engine, model, [head], 2)
        assert engine.scheduler.stats().num_state_snapshots == 3  # after 128, 256 and 384
        check(engine, model, [[*head[:300], 1]], 2)
        assert engine.scheduler.stats().prefix_cache_hits == 256


def test_parallel_samples_share_the_prompt(model):
    ids = prompt(3, 150)
    with make_engine(model) as engine:
        check(engine, model, [ids], 30, n=3, temperature=1.0)
        assert engine.scheduler.stats().prefix_cache_hits == 2 * 128


@pytest.mark.parametrize("num_run", [1, 3])
def test_a_failed_step_leaves_no_wrong_state(model, num_run):
    """States are updated in place: every request of a failed step is computed anew."""
    prompts = [prompt(i, 80 + i) for i in range(4)]
    with make_engine(model) as engine:
        real = engine.runner.launch
        calls = 0

        def launch(output):
            nonlocal calls
            calls += 1
            step = real(output)
            if calls in (num_run, num_run + 5):
                raise OutOfMemoryError("not enough, as a test")
            return step

        engine.runner.launch = launch
        check(engine, model, prompts, 30)
        assert engine.scheduler.stats().num_retries > 0


def test_the_plan_counts_the_states(model):
    with make_engine(model, num_state_snapshots=5, max_draft_tokens=2) as engine:
        assert engine.kv_cache.num_slots == 4 + 4 * 2 + 5
        assert engine.kv_cache.geometry.bytes_per_slot == BYTES_PER_SLOT
        reason = engine.config.reasons["num_state_slots"]
        assert reason == "17 slots of 32 B (544 B): 4 for requests, 8 for drafts, 5 for snapshots"
    with pytest.raises(ConfigError, match="state_dtype must be 'auto' or 'float32' with determin"):
        make_engine(model, state_dtype="bfloat16")
    with pytest.raises(ConfigError, match="max_draft_tokens must be at most 7 for a model with"):
        make_engine(model, max_draft_tokens=8)
    with pytest.raises(ConfigError, match="num_speculative_tokens must be at most 7 for"):
        make_engine(model, speculative_config={"method": "ngram", "num_speculative_tokens": 8})
    with make_engine(model, speculative_config={"method": "ngram"}) as engine:
        assert engine.config.scheduler.max_draft_tokens == 7
        assert engine.config.reasons["max_draft_tokens"].startswith("7: as many as recurrent")
    with pytest.raises(ConfigError, match="max_draft_tokens must be at most 7 for a model with"):
        make_engine(model, max_draft_tokens=9, speculative_config={"method": "ngram"})
    with pytest.raises(ConfigError, match=r"swap_space_gb must have room .*; got 1e-09 GiB"):
        make_engine(model, swap_space_gb=1e-9, preemption_mode="swap")
    model.deterministic = False
    with make_engine(model, state_dtype="bfloat16") as engine:
        assert engine.kv_cache.geometry.bytes_per_slot == 4 * 3 + 2 * 5
    with pytest.raises(ConfigError, match="state_dtype must be one of"):
        make_engine(model, state_dtype="float16")


def test_models_without_states_have_no_slots():
    from engine.models.mock_model import MockModel

    with make_engine(MockModel(), num_state_snapshots=7) as engine:
        assert engine.kv_cache.num_slots == 0 and engine.scheduler.blocks.states is None
        assert engine.runner._table.state_slots is None
        assert "num_state_slots" not in engine.config.reasons


def test_states_of_two_dtypes():
    """Rounding every token's state to bfloat16 changes logits by about its precision."""
    model = tiny_model(config=HYBRID)
    ids = np.array([prompt(1, 50, 97), prompt(2, 50, 97)])
    logits = {}
    for state_dtype in ("float32", "bfloat16"):
        cache = model.new_cache(2, 60, state_dtype=state_dtype)
        dtypes = [str(slab.dtype) for slab in cache.kv.state_slabs]
        assert dtypes == ["float32", state_dtype]  # the convolutions' inputs, and the states
        for token in ids.T:
            logits[state_dtype] = model.step(token[:, None], cache).copy()
    error = np.abs(logits["bfloat16"] - logits["float32"]).max() / logits["float32"].std()
    assert 1e-5 < error < 0.05


def test_a_row_that_begins_anew_starts_from_zeros():
    model = tiny_model(config=HYBRID)
    ids = np.array([prompt(1, 20, 97), prompt(2, 20, 97)])
    cache = model.new_cache(2, 30)
    want = model.step(ids, cache).copy()
    model.step(ids[:, :5], cache)
    cache.reset()
    np.testing.assert_array_equal(model.step(ids, cache), want)


def test_the_array_door_rejects_a_rollback(model):
    from engine.cache.array_cache import Cache

    geometry = KVGeometry.of_model(model.config, "float32")
    cache = Cache(geometry, batch_size=2, max_tokens=40)
    assert cache.state_slots.tolist() == [0, 1]
    assert isinstance(cache.kv, KVCache) and cache.kv.num_slots == 2
    cache.append(5)
    with pytest.raises(RequestError, match="states cannot be rolled back; got 3 for a row of 5"):
        cache.truncate(3)
    cache.truncate(5)
    cache.truncate(0, row=1)
    assert cache.lengths.tolist() == [5, 0]
