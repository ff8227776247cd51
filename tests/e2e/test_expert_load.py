"""How many tokens each expert has had: `EngineStats.expert_load`."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from engine import SamplingParams
from engine.config import MoeConfig
from tests.e2e.tiny import CONFIG, make_engine, run, tiny_model

TOP_K, E = 2, 5
LAYERS = (1, 2, 3)  # the layers with experts
MIXED = dataclasses.replace(
    CONFIG,
    model_type="qwen3_moe",
    num_layers=5,
    qk_norm=True,
    moe=MoeConfig(E, TOP_K, 16, tuple(layer in LAYERS for layer in range(5))),
)
rng = np.random.default_rng(3)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def model(request):
    return tiny_model(request.param, MIXED)


def _engine(model, *, graphs=False, **options):
    """On the CPU, graphs are the steps that they would capture."""
    options.setdefault("enable_prefix_caching", False)
    engine = make_engine(model, cuda_graphs=graphs and model.device.is_cuda, **options)
    if graphs and engine.runner.graphs is None:
        engine.runner.capture_graphs(engine.config.scheduler.max_model_len)
    return engine


def _serve(engine, *lengths, num_new=6):
    """Serve prompts of these lengths; return how many tokens a layer computes for them."""
    params = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True)
    for index, length in enumerate(lengths):
        engine.add_request(f"r{index}", rng.integers(4, 90, length).tolist(), params)
    run(engine)
    return sum(length + num_new - 1 for length in lengths)


def _totals(engine):
    load = engine.stats().expert_load
    assert tuple(load) == LAYERS and all(len(counts) == E for counts in load.values())
    assert all(type(count) is int for counts in load.values() for count in counts)
    return [sum(counts) for counts in load.values()]


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("lengths", [(9,), (40, 5, 17), (3, 3, 3, 3, 30)])
def test_totals_are_top_k_per_computed_token(model, lengths, graphs):
    """Three sequences are padded to a graph of four; prompts of more than 24 tokens are chunked."""
    engine = _engine(model, graphs=graphs)
    assert _totals(engine) == [0] * len(LAYERS)
    computed = _serve(engine, *lengths)
    assert _totals(engine) == [TOP_K * computed] * len(LAYERS)


def test_only_padding_is_left_out(model):
    """The slots are what tells a graph's padding from its tokens."""
    moe = model.decoder.layers[LAYERS[0]].mlp
    x = model.device.xp.ones((4, MIXED.hidden_size), np.float32)
    moe(x, slots=model.device.xp.array([5, -1, 0, -1]))
    assert int(moe.load.sum()) == 2 * TOP_K
    moe(x)
    assert int(moe.load.sum()) == 6 * TOP_K


def test_chunks_do_not_change_the_counts(model):
    """In deterministic mode, the experts of a prompt do not depend on how it is chunked."""
    model = tiny_model(model.device.kind, MIXED, deterministic=True)
    engine, other = _engine(model), _engine(model, max_num_batched_tokens=7)
    prompt = rng.integers(4, 90, 23).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=1)
    loads = []
    for each in (engine, other):
        before = model.expert_load()
        each.add_request("r", prompt, params)
        run(each)
        after = model.expert_load()
        loads.append({layer: (after[layer] - before[layer]).tolist() for layer in after})
    assert loads[0] == loads[1] and all(sum(c) == 23 * TOP_K for c in loads[0].values())


def test_tokens_from_the_prefix_cache_are_not_counted(model):
    engine = _engine(model, enable_prefix_caching=True)
    prompt = rng.integers(4, 90, 40).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=1)
    for request_id in ("first", "second"):
        engine.add_request(request_id, prompt, params)
        run(engine)
    hits = engine.stats().prefix_cache_hits
    assert hits == 32
    assert _totals(engine) == [TOP_K * (2 * len(prompt) - hits)] * len(LAYERS)


def test_a_step_that_is_rolled_back_counts_twice(model, monkeypatch):
    engine = _engine(model)
    read, calls = engine.runner.read, []

    def fail_once(*args):
        calls.append(args)
        if len(calls) == 1:
            raise RuntimeError("fault")
        return read(*args)

    monkeypatch.setattr(engine.runner, "read", fail_once)
    params = SamplingParams(temperature=0.0, max_tokens=1)
    engine.add_request("r", rng.integers(4, 90, 10).tolist(), params)
    while engine.has_unfinished_requests():
        engine.step()
    assert engine.stats().num_step_failures == 1
    assert _totals(engine) == [2 * TOP_K * 10] * len(LAYERS)


def test_the_last_layer_counts_the_tokens_that_it_computes():
    """On the CPU, only those whose logits are wanted go through the last layer's experts."""
    moe = MoeConfig(E, TOP_K, 16, (True,) * 2)
    config = dataclasses.replace(MIXED, num_layers=2, moe=moe)
    engine = _engine(tiny_model("cpu", config))
    computed = _serve(engine, 20, 30, num_new=4)
    load = engine.stats().expert_load
    assert [sum(load[layer]) for layer in (0, 1)] == [TOP_K * computed, TOP_K * 2 * 4]


def test_an_engine_counts_from_its_own_start(model):
    computed = _serve(first := _engine(model), 12)
    second = _engine(model)
    assert _totals(first) == [TOP_K * computed] * len(LAYERS)
    assert _totals(second) == [0] * len(LAYERS)
    model.close()
    assert second.stats().expert_load == {}


def test_dense_models_have_no_experts():
    model = tiny_model()
    engine = _engine(model)
    _serve(engine, 12)
    assert engine.stats().expert_load == {}
    assert model.expert_load() == {} and model.decoder.expert_load().shape == (0, 0)


def test_the_array_of_all_layers(model):
    cache = model.new_cache(1, 16)
    model.step([[5, 6, 7]], cache)
    load = model.decoder.expert_load()
    assert isinstance(load, np.ndarray) and load.dtype == np.int64
    assert load.shape == (len(LAYERS), E) and load.sum(1).tolist() == [3 * TOP_K] * len(LAYERS)
