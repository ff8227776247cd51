"""`sleep` and `wake_up`: memory is free meanwhile, and outputs are the same afterwards."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import weakref

import numpy as np
import pytest

from engine import SamplingParams, llm_engine
from engine.async_engine import AsyncEngine
from engine.cache.kv_cache import KVCache
from engine.cache.memory_pool import device_memory
from engine.config import MoeConfig
from engine.errors import ConfigError, EngineError, OutOfMemoryError, RequestError
from engine.llm_engine import LLMEngine
from engine.loading import parked_decoder
from engine.model import load
from tests.e2e.tiny import CONFIG, HYBRID, make_engine, make_llm, run, swap_gb, tiny_model

PROMPT = np.random.default_rng(3).integers(4, 97, 90).tolist()
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=0)
TIED = dataclasses.replace(CONFIG, tie_word_embeddings=True)
EXPERTS = dataclasses.replace(CONFIG, moe=MoeConfig(4, 2, 32, (True,) * CONFIG.num_layers))
CONFIGS = {"attention": CONFIG, "tied": TIED, "hybrid": HYBRID, "experts": EXPERTS}


def served(engine, name, prompt=PROMPT, params=GREEDY):
    """Return the ids and log-probabilities of one request, and the number of cached tokens."""
    engine.add_request(name, prompt, params)
    output = run(engine)[name]
    entries = output.outputs[0].logprobs
    return [{i: e[i].logprob for i in e} for e in entries], output.num_cached_tokens


def weight_arrays(model):
    """Weak references to the arrays of all weights."""
    weights = model.decoder.weights.values()
    return [weakref.ref(array) for weight in weights for _, array in weight.arrays()]


def test_weights_are_free_without_garbage_collection(monkeypatch):
    """Collecting takes as long as copying gigabytes, in the second sleep as in the first."""
    model = tiny_model()
    monkeypatch.setattr("engine.model.gc.collect", lambda: pytest.fail("some arrays were alive"))
    gc.disable()
    try:
        for _ in range(3):
            arrays = weight_arrays(model)
            model.sleep()
            assert not any(ref() is not None for ref in arrays)
            model.wake_up()
    finally:
        gc.enable()


@pytest.mark.parametrize("options", [{}, {"async_scheduling": True, "swap_space_gb": swap_gb(8)}],
                         ids=["plain", "swap"])  # fmt: skip
@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("kind", CONFIGS)
def test_outputs_are_the_same_after_a_sleep(kind, level, options):
    model = tiny_model(config=CONFIGS[kind], deterministic=True)
    engine = make_engine(model, **options)
    want, _ = served(engine, "a")
    tokens = engine.stats().generation_tokens
    for number in range(2):
        arrays = weight_arrays(model)
        slabs = [weakref.ref(slab) for slab in engine.kv_cache.page_slabs]
        num_bytes = model.weight_bytes - model.decoder.table_bytes
        engine.sleep(level)
        engine.sleep(level)  # nothing more to do
        gc.collect()
        assert engine.is_sleeping and engine._pool.stats().slabs == {}
        assert not any(ref() is not None for ref in (*arrays, *slabs))
        assert model._parked.num_bytes == (num_bytes if level == 1 else 0)
        engine.check_integrity()
        assert engine.stats().generation_tokens == tokens * (number + 1)
        engine.wake_up()
        engine.wake_up()
        assert not engine.is_sleeping and model._parked is None
        assert served(engine, f"b{number}") == (want, 0)
    assert served(engine, "c") == (want, 64 if kind == "hybrid" else 80)
    engine.close()


@pytest.mark.gpu
@pytest.mark.parametrize("level", [1, 2])
def test_device_memory_is_free_during_a_sleep(level):
    """On a GPU, with graphs: weights and pages are gone, and the graphs captured anew."""
    config = dataclasses.replace(CONFIG, vocab_size=1 << 16)
    model = tiny_model("cuda", config, deterministic=True)
    engine = make_engine(model, cuda_graphs=True, num_blocks=4096)
    want, _ = served(engine, "a")
    pool = model.device.xp.get_default_memory_pool()
    pages = engine._pool.stats().used
    weights = model.weight_bytes - model.decoder.table_bytes
    free = device_memory(model.device)[1]
    for number in range(2):
        before = pool.used_bytes()
        engine.sleep(level)
        assert pool.used_bytes() <= before - weights and engine.runner.graphs is None
        assert device_memory(model.device)[1] >= free + pages
        engine.wake_up()
        assert engine.runner.graphs is not None
        assert served(engine, f"b{number}") == (want, 0)
    engine.close()


@pytest.mark.gpu
def test_logits_on_a_gpu_stay_the_same_bit_for_bit():
    """Host memory is kept for the next sleep, and given back by one at level 2 and by `close`."""
    model = tiny_model("cuda", dataclasses.replace(CONFIG, vocab_size=1 << 16), deterministic=True)

    def logits():
        cache = model.new_cache(1, len(PROMPT))
        found = model.step([PROMPT], cache).get()
        cache.close()
        return found

    want = logits()
    weights = model.weight_bytes - model.decoder.table_bytes
    pool = model.device.xp.get_default_memory_pool()
    addresses = []
    for level in (1, 1, 2, 1):
        before = pool.used_bytes()
        model.sleep(level)
        assert pool.used_bytes() <= before - weights
        buffers = model._host_copies._buffers
        assert (model._host_copies.num_bytes >= weights) == (level == 1)
        addresses.append([buffer.ctypes.data for buffer in buffers])
        del buffers
        model.wake_up()
        assert np.array_equal(logits(), want)
    assert addresses[0] == addresses[1] and addresses[0] and not addresses[2]
    model.close()
    assert model._host_copies.num_bytes == 0


def test_a_model_whose_weights_the_host_cannot_hold_stays_awake(monkeypatch):
    model = tiny_model(config=EXPERTS)
    model.step([PROMPT], model.new_cache(1, len(PROMPT)))
    load_of = {layer: counts.copy() for layer, counts in model.expert_load().items()}

    def full(arrays):
        raise OutOfMemoryError("the host is full")

    monkeypatch.setattr(model._host_copies, "take", full)
    with pytest.raises(OutOfMemoryError, match="the host is full"):
        model.sleep()
    found = model.expert_load()
    assert all(np.array_equal(found[layer], counts) for layer, counts in load_of.items())
    assert model.step([[1]], model.new_cache(1, 4)).shape == (1, 97)


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("quantization", [None, "none"])
def test_a_checkpoint(level, quantization):
    """Weights of a file: SmolLM2, whose output layer is its embedding unless that is quantized."""
    model = load("smollm2", device="cpu", dtype="float32", quantization=quantization)
    logits = model.step([[1, 2, 3]], model.new_cache(1, 4))
    model.sleep(level)
    with pytest.raises(EngineError, match="the model is asleep, wake it up first"):
        model.new_cache(1, 4)
        model.step([[1, 2, 3]], model.new_cache(1, 4))
    model.wake_up()
    is_tied = model.decoder.weights["embed"] is model.decoder.weights["lm_head"]
    assert is_tied == (quantization == "none")
    assert np.array_equal(model.step([[1, 2, 3]], model.new_cache(1, 4)), logits)
    model.close()


@pytest.mark.parametrize("level", [1, 2])
def test_scales_of_quantized_pages_stay(level):
    model = tiny_model(deterministic=True)
    engine = make_engine(model, kv_cache_dtype="int8")
    scales = model.kv_scales_of("int8") * 1.5
    model.set_kv_scales(scales, "int8")
    want, _ = served(engine, "a")
    engine.sleep(level)
    engine.wake_up()
    assert np.array_equal(model.kv_scales_of("int8"), scales)
    assert model.decoder.kv_scales.sources["int8"] == "set by set_kv_scales"
    assert served(engine, "b") == (want, 0)
    engine.close()


def test_quantized_weights_stay():
    model = load(config=CONFIG, load_format="dummy", device="cpu", dtype="float32",
                 quantization="int8")  # fmt: skip
    logits = model.step([PROMPT], model.new_cache(1, 96))
    model.sleep()
    model.wake_up()
    assert np.array_equal(model.step([PROMPT], model.new_cache(1, 96)), logits)


def test_counts_of_experts_go_on():
    model = tiny_model(config=EXPERTS)
    engine = make_engine(model)
    served(engine, "a")
    before = {layer: counts.copy() for layer, counts in model.expert_load().items()}
    assert sum(counts.sum() for counts in before.values()) > 0
    engine.sleep()
    asleep = model.expert_load()
    assert all(np.array_equal(asleep[layer], counts) for layer, counts in before.items())
    engine.wake_up()
    served(engine, "b")
    after = model.expert_load()
    assert all(np.array_equal(after[layer], 2 * counts) for layer, counts in before.items())
    engine.close()


def test_drafts_without_weights_go_on():
    model = tiny_model(deterministic=True)
    config = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}
    engine = make_engine(model, speculative_config=config)
    want, _ = served(engine, "a", PROMPT * 2)
    engine.sleep()
    engine.wake_up()
    assert served(engine, "b", PROMPT * 2)[0] == want
    assert engine.stats().speculation.num_proposer_failures == 0
    engine.close()


# ---- what is refused


def test_a_sleeping_engine_refuses_requests():
    engine = make_engine(tiny_model())
    engine.sleep()
    with pytest.raises(EngineError, match="the engine is asleep") as caught:
        engine.add_request("a", PROMPT, GREEDY)
    assert not isinstance(caught.value, RequestError)
    assert engine.reset_prefix_cache() == 0 and not engine.has_unfinished_requests()
    engine.close()
    assert not engine.is_sleeping
    with pytest.raises(RequestError, match="was closed"):
        engine.add_request("a", PROMPT, GREEDY)
    with pytest.raises(RequestError, match="it was closed"):
        engine.sleep()


def test_an_engine_with_requests_does_not_sleep():
    engine = make_engine(tiny_model())
    engine.add_request("a", PROMPT, GREEDY)
    with pytest.raises(RequestError, match="without unfinished requests; got 1"):
        engine.sleep()
    assert len(run(engine)["a"].outputs[0].token_ids) == 10
    for level in (0, 3, True, "1"):
        with pytest.raises(ConfigError, match="level must be 1 or 2"):
            engine.sleep(level)
    assert not engine.is_sleeping
    engine.close()


def test_draft_models_cannot_sleep(monkeypatch):
    draft = tiny_model()
    monkeypatch.setattr(llm_engine, "load_draft", lambda config, _: config and draft)
    config = {"model": "tiny", "num_speculative_tokens": 2, "adaptive": False}
    engine = make_engine(tiny_model(), speculative_config=config)
    with pytest.raises(ConfigError, match="without a draft model"):
        engine.sleep()
    assert len(served(engine, "a")[0]) == 10
    engine.close()


@pytest.mark.parametrize("ranks", [{"num_ranks": 2}, {"num_stages": 2}], ids=str)
def test_several_processes_cannot_sleep(ranks, monkeypatch):
    model = tiny_model()
    for name, value in ranks.items():
        monkeypatch.setattr(model, name, value)
    with pytest.raises(ConfigError, match="one process"):
        model.sleep()


def test_a_model_with_adapters_cannot_sleep():
    model = load(config=CONFIG, load_format="dummy", device="cpu", enable_lora=True)
    with pytest.raises(ConfigError, match="without LoRA adapters"):
        model.sleep()
    assert model.step([[1]], model.new_cache(1, 4)).shape == (1, 97)


@pytest.mark.parametrize("where", ["weights", "pages"])
def test_an_engine_that_cannot_wake_up_sleeps_on(where, monkeypatch):
    engine = make_engine(tiny_model(deterministic=True))
    want, _ = served(engine, "a")
    engine.sleep()

    def full(*_, **__):
        raise OutOfMemoryError("the device is full")

    with monkeypatch.context() as patch:
        if where == "weights":
            patch.setattr(parked_decoder, "Decoder", full)
        else:
            patch.setattr(llm_engine, "KVCache", full)
        for _ in range(2):
            with pytest.raises(OutOfMemoryError, match="the device is full"):
                engine.wake_up()
            assert engine.is_sleeping and engine._pool.stats().slabs == {}
    assert llm_engine.KVCache is KVCache
    engine.wake_up()
    assert served(engine, "b") == (want, 0)
    engine.close()


# ---- other doors


def test_the_offline_engine():
    llm = make_llm(tiny_model(deterministic=True))
    [want] = llm.generate([PROMPT], GREEDY)
    llm.sleep(2)
    assert llm.is_sleeping
    with pytest.raises(EngineError, match="asleep"):
        llm.generate([PROMPT], GREEDY)
    llm.wake_up()
    [found] = llm.generate([PROMPT], GREEDY)
    assert found.outputs[0].token_ids == want.outputs[0].token_ids and not llm.is_sleeping
    llm.sleep()
    llm.close()


def test_the_async_engine():
    async def main():
        engine = AsyncEngine(LLMEngine(tiny_model(), num_blocks=64))
        stream = engine.generate(PROMPT, GREEDY)
        await anext(stream)
        with pytest.raises(RequestError, match="unfinished"):
            await engine.sleep()
        assert [output async for output in stream][-1].finished
        await engine.sleep()
        assert await engine.is_sleeping()
        with pytest.raises(EngineError, match="asleep"):
            await anext(engine.generate(PROMPT, GREEDY))
        with pytest.raises(EngineError, match="asleep"):
            await engine.embed([PROMPT])
        await engine.wake_up()
        assert len(await engine.embed([PROMPT])) == 1
        async for output in engine.generate(PROMPT, GREEDY):
            last = output
        assert len(last.outputs[0].token_ids) == 10
        await engine.sleep()
        await engine.close()

    asyncio.run(asyncio.wait_for(main(), 60))
