"""The engine's options: prefix cache and salts, policies, limits, swap, debug."""

from __future__ import annotations

import gc
import math

import numpy as np
import pytest

from engine import LLMEngine, SamplingParams, llm_engine
from engine.engine_config import EngineConfig
from engine.errors import ConfigError, RequestError
from engine.llm_engine import QueueFullError
from engine.models.mock_model import MockModel
from engine.sampling_params import RANGES
from tests.e2e.tiny import VOCAB, freed_pools, greedy_alone, make_engine, run, swap_gb, tiny_model

LONG = [int(i) for i in np.random.default_rng(3).integers(4, VOCAB, 90)]
SHORT = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def _serve(engine, prompt, **options):
    engine.add_request("r", prompt, SHORT, **options)
    return run(engine)["r"]


def test_a_cached_prefix_is_not_recomputed(model):
    engine = make_engine(model)
    assert _serve(engine, LONG).num_cached_tokens == 0
    warm = _serve(engine, LONG)
    assert warm.num_cached_tokens == 80
    assert list(warm.outputs[0].token_ids) == greedy_alone(model, LONG, 3, eos=False)
    assert _serve(engine, [*LONG[:40], 5, 6]).num_cached_tokens == 32
    engine.reset_prefix_cache()
    assert _serve(engine, LONG).num_cached_tokens == 0
    stats = engine.stats()
    assert stats.prefix_cache_hits == 112 and stats.prefix_cache_queries > 112


def test_prefix_caching_can_be_turned_off(model):
    engine = make_engine(model, enable_prefix_caching=False)
    assert [_serve(engine, LONG).num_cached_tokens for _ in range(2)] == [0, 0]


def test_requests_of_different_salts_share_nothing(model):
    engine = make_engine(model)
    assert _serve(engine, LONG, cache_salt="a").num_cached_tokens == 0
    assert _serve(engine, LONG).num_cached_tokens == 0
    assert _serve(engine, LONG, cache_salt="b").num_cached_tokens == 0
    assert _serve(engine, LONG, cache_salt="a").num_cached_tokens == 80
    in_prompt = {"prompt_token_ids": LONG, "cache_salt": "a"}
    assert _serve(engine, in_prompt).num_cached_tokens == 80
    with pytest.raises(RequestError, match="cache_salt must be a non-empty str"):
        engine.add_request("x", {"prompt_token_ids": LONG, "cache_salt": 5})


def test_a_salt_has_its_quota(model):
    engine = make_engine(model, max_blocks_per_salt=2)
    _serve(engine, LONG, cache_salt="a")
    assert _serve(engine, LONG, cache_salt="a").num_cached_tokens <= 32


def test_sampling_at_both_ends_of_each_range(model):
    engine = make_engine(model)
    names = [name for name, allowed in RANGES.items() if not allowed.integer]
    for name in names:
        allowed = RANGES[name]
        low = math.nextafter(allowed.low, 1) if allowed.low_open else allowed.low
        for end, value in {"low": low, "high": allowed.high}.items():
            fields = {"max_tokens": 3, "ignore_eos": True, "seed": 1, name: value}
            engine.add_request(f"{name} {end}", LONG[:8], SamplingParams(**fields))
    found = {name: output.outputs[0].finish_reason for name, output in run(engine).items()}
    assert found == {f"{name} {end}": "length" for name in names for end in ("low", "high")}


def _order_of_ends(engine):
    ended = []
    while engine.has_unfinished_requests():
        ended += [o.request_id for o in engine.step() if o.finished]
    return ended


def test_priorities(model):
    engine = make_engine(model, max_num_seqs=1)
    for name, priority in (("a", 0), ("b", 2), ("c", -1), ("d", 0)):
        engine.add_request(name, LONG[:5], SHORT, priority=priority)
    assert _order_of_ends(engine) == ["c", "a", "d", "b"]
    engine = make_engine(model, max_num_seqs=1, priority_window=0)
    for name, priority in (("a", 0), ("b", -2)):
        engine.add_request(name, LONG[:5], SHORT, priority=priority)
    assert _order_of_ends(engine) == ["a", "b"]


def test_longest_prefix_first(model):
    for policy, want in (("fcfs", ["cold", "warm"]), ("lpm", ["warm", "cold"])):
        engine = make_engine(model, max_num_seqs=1, scheduling_policy=policy)
        _serve(engine, LONG)
        engine.add_request("cold", LONG[::-1], SHORT)
        engine.add_request("warm", LONG, SHORT)
        assert _order_of_ends(engine) == want


def test_a_full_queue_refuses_requests_and_recovers(model):
    engine = make_engine(model, max_num_seqs=1, max_num_queued_requests=2)
    engine.add_request("a", LONG[:5], SHORT)
    engine.add_request("b", LONG[:5], SHORT)
    with pytest.raises(QueueFullError, match="max_num_queued_requests=2; try again later"):
        engine.add_request("c", LONG[:5], SHORT)
    engine.step()
    engine.add_request("c", LONG[:5], SHORT)
    with pytest.raises(QueueFullError):
        engine.add_request("d", LONG[:5], SamplingParams(n=2, seed=1))
    assert set(run(engine)) == {"a", "b", "c"}
    assert engine.stats().admission_rejections == 2
    engine = make_engine(model, max_num_seqs=1, max_num_queued_tokens=100)
    engine.add_request("a", LONG, SHORT)
    with pytest.raises(QueueFullError, match="max_num_queued_tokens=100"):
        engine.add_request("b", LONG[:11], SHORT)


def test_a_request_that_can_never_fit_is_refused(model):
    engine = make_engine(model, num_blocks=8, max_model_len=128)
    engine.add_request("fits", LONG, SamplingParams(max_tokens=38))
    engine = make_engine(model, num_blocks=16, max_model_len=256)
    with pytest.raises(RequestError, match="at most 255 tokens"):
        engine.add_request("r", LONG * 3, SHORT)


@pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])
def test_preemption_modes(model, mode):
    engine = make_engine(
        model,
        num_blocks=8,
        max_model_len=128,
        watermark=0.0,
        preemption_mode=mode,
        swap_space_gb=swap_gb(16),
        enable_prefix_caching=False,
    )
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    for index in range(3):
        engine.add_request(str(index), LONG[index : index + 40], params)
    outputs = run(engine)
    stats = engine.scheduler.stats()
    assert stats.num_preemptions > 0 and stats.num_host_blocks == 16
    assert (stats.num_swaps > 0) == (mode == "swap") or mode == "auto"
    for index in range(3):
        want = greedy_alone(model, LONG[index : index + 40], 60, eos=False)
        assert list(outputs[str(index)].outputs[0].token_ids) == want


def test_evicted_prefixes_come_back_from_the_host(model):
    engine = make_engine(model, num_blocks=8, max_model_len=128, swap_space_gb=swap_gb(16))
    _serve(engine, LONG)
    _serve(engine, LONG[::-1])
    back = _serve(engine, LONG)
    assert back.num_cached_tokens == 80
    assert engine.scheduler.stats().prefix_cache_host_hits > 0
    assert list(back.outputs[0].token_ids) == greedy_alone(model, LONG, 3, eos=False)


def test_async_outputs_come_one_step_later(model):
    engine = make_engine(model, async_scheduling=True)
    engine.add_request("r", [5, 6, 7], SHORT)
    counts = []
    while engine.has_unfinished_requests():
        counts.append([len(o.outputs[0].token_ids) for o in engine.step()])
    assert counts == [[], [1], [2], [3]]


def test_processors_wait_for_the_host(model):
    """The next step is launched before the previous one is read; its sampling is not."""
    engine = make_engine(model, async_scheduling=True)
    seen = []
    params = SamplingParams(
        temperature=0,
        max_tokens=3,
        ignore_eos=True,
        logits_processors=[lambda ids, _: seen.append((len(ids), len(engine._in_flight)))],
    )
    engine.add_request("bound", [5, 6, 7], params)
    engine.add_request("free", [8, 9], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    launch, in_flight = engine.runner.launch, []

    def recorded(output):
        in_flight.append(len(engine._in_flight))
        return launch(output)

    engine.runner.launch = recorded
    run(engine)
    assert in_flight == [0] + [1] * 7
    assert seen == [(0, 1), (1, 1), (2, 1)]  # the step that is sampled is the only one in flight


def test_debug_is_an_option_or_a_variable(monkeypatch):
    monkeypatch.setenv("ENGINE_DEBUG", "1")
    assert LLMEngine(MockModel()).config.is_debug
    assert not LLMEngine(MockModel(), debug=False).config.is_debug
    monkeypatch.setenv("ENGINE_DEBUG", "yes")
    with pytest.raises(ConfigError, match="ENGINE_DEBUG must be one of 0, 1"):
        LLMEngine(MockModel())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"swap_space_gb": -1.0}, r"swap_space_gb must be a number in \[0.0, .*; got -1.0"),
        ({"swap_space_gb": "4"}, "swap_space_gb must be a number .*; got '4'"),
        ({"step_timeout": 0.0}, r"step_timeout must be a number in \(0.0, .*; got 0.0"),
        ({"step_timeout": float("inf")}, "step_timeout must be a number .*; got inf"),
        ({"raise_on_timeout": True}, "raise_on_timeout needs a step_timeout"),
        ({"raise_on_timeout": "no"}, "raise_on_timeout must be one of True, False; got 'no'"),
        ({"scheduling_policy": "lifo"}, "scheduling_policy must be one of 'fcfs', 'lpm'"),
        ({"preemption_mode": "drop"}, "preemption_mode must be one of .*; got 'drop'"),
        ({"preemption_mode": "swap"}, "preemption_mode='swap' needs a swap_space_gb above 0"),
        ({"watermark": 1.5}, r"watermark must be a number in \[0.0, 1.0\]; got 1.5"),
        ({"watermark": float("nan")}, "watermark must be a number .*; got nan"),
        ({"max_num_queued_requests": 0}, "max_num_queued_requests must be a whole number .* got 0"),
        ({"max_num_seqs": 2**70}, r"max_num_seqs must be a whole number in \[1, 65536\], or None"),
        ({"max_prefill_chunk": 1.5}, "max_prefill_chunk must be a whole number .*; got 1.5"),
        ({"block_size": 24}, "block_size must be one of .*; got 24"),
        ({"block_size": 16.0}, "block_size must be a whole number .*; got 16.0"),
        ({"seed": "a"}, "seed must be a whole number .*; got 'a'"),
        ({"enable_prefix_caching": 1}, "enable_prefix_caching must be one of True, False; got 1"),
        ({"async_scheduling": "no"}, "async_scheduling must be one of True, False, None; got 'no'"),
        (
            {"memory_utilization": 0.5, "gpu_memory_utilization": 0.5},
            "give memory_utilization or gpu_memory_utilization, not both",
        ),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        LLMEngine(MockModel(), **options)


def test_a_wrong_block_size_is_refused_before_a_model_is_loaded():
    with pytest.raises(ConfigError, match=r"block_size must be one of \(16, .*; got 24"):
        EngineConfig(block_size=24)


def test_numpy_numbers_are_accepted():
    engine = LLMEngine(
        MockModel(), max_num_seqs=np.int64(3), block_size=np.int32(32), watermark=np.float32(0.5)
    )
    limits = engine.config.scheduler
    assert (limits.max_num_seqs, limits.block_size, limits.watermark) == (3, 32, 0.5)


def test_a_fork_shares_its_parents_blocks(model):
    engine = make_engine(model)
    engine.add_request("parent", LONG, SamplingParams(temperature=0, max_tokens=20))
    outputs = {}
    while not outputs.get("parent") or len(outputs["parent"].outputs[0].token_ids) < 3:
        outputs.update((o.request_id, o) for o in engine.step())
    prompt = [*LONG, *outputs["parent"].outputs[0].token_ids[:2], 42]
    engine.add_request("child", prompt, SHORT, parent="parent")
    child = run(engine)["child"]
    assert child.num_cached_tokens == len(LONG) + 2
    assert list(child.outputs[0].token_ids) == greedy_alone(model, prompt, 3, eos=False)
    with pytest.raises(RequestError, match="parent must be an unfinished request"):
        engine.add_request("orphan", prompt, SHORT, parent="parent")


def test_close_frees_everything(model):
    engine = make_engine(model, async_scheduling=True, step_timeout=60.0)
    engine.add_request("r", LONG, SamplingParams(max_tokens=20))
    for _ in range(6):
        engine.step()
    engine.close()
    assert not engine.has_unfinished_requests() and engine.kv_cache.slab.size == 0
    engine.close()  # a second call does nothing
    assert engine.step() == []
    with pytest.raises(RequestError, match="the engine was closed"):
        engine.add_request("late", LONG)


@pytest.mark.gpu
@pytest.mark.parametrize("has_draft", [False, True], ids=["alone", "draft model"])
def test_device_memory_is_free_after_close(monkeypatch, has_draft):
    """Pages and graphs return to the device, without the garbage collector."""
    monkeypatch.setattr(
        llm_engine, "load_draft", lambda config, target: config and tiny_model("cuda")
    )
    config = {"model": "tiny", "num_speculative_tokens": 2} if has_draft else None
    model = tiny_model("cuda")
    engine = make_engine(model, cuda_graphs=True, speculative_config=config)
    owners = [engine, engine.speculation._proposer._proposer] if has_draft else [engine]
    engine.add_request("r", LONG, SamplingParams(max_tokens=20))
    run(engine)
    gc.disable()
    try:
        with freed_pools(*owners):
            engine.close()
    finally:
        gc.enable()


def test_a_watermark_of_all_blocks_runs_one_request_at_a_time(model):
    engine = make_engine(model, watermark=1.0)
    for name in "ab":
        engine.add_request(name, LONG[:5], SHORT)
    assert _order_of_ends(engine) == ["a", "b"]
    assert engine.stats().request_success == {"length": 2}
