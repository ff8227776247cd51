"""`sleep` and `wake_up`: memory is free meanwhile, and outputs are the same afterwards."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import threading
import weakref

import numpy as np
import pytest

from engine import LoRARequest, SamplingParams, llm_engine
from engine.async_engine import AsyncEngine
from engine.cache.kv_cache import KVCache
from engine.config import MoeConfig
from engine.device import resolve_device
from engine.errors import ConfigError, EngineError, OutOfMemoryError, RequestError
from engine.layers.lora import AdapterSlots
from engine.llm_engine import LLMEngine
from engine.loading import parked_decoder
from engine.model import load
from tests.e2e.tiny import (
    CONFIG,
    HYBRID,
    freed_pools,
    greedy_alone,
    make_engine,
    make_llm,
    run,
    swap_gb,
    tiny_model,
)
from tests.lora_files import GREEDY as TOKENS
from tests.lora_files import Served, tokens_of, write_adapter

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
    engine = make_engine(model, cuda_graphs=True)
    want, _ = served(engine, "a")
    pool = model.device.xp.get_default_memory_pool()
    weights = model.weight_bytes - model.decoder.table_bytes
    for number in range(2):
        before = pool.used_bytes()
        with freed_pools(engine):
            engine.sleep(level)
        assert pool.used_bytes() <= before - weights and engine.runner.graphs is None
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


# ---- adapters


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    return Served(tmp_path_factory.mktemp("adapted"))


def checked(llm, files, which):
    """Check the tokens of adapters `which`; return the number of cached tokens of each prompt."""
    prompts = [{"prompt_token_ids": prompt} for prompt in files.prompts]
    requests = [files.request(index) for index in which]
    found = llm.generate(prompts, TOKENS, lora_request=requests)
    want = [files.want[row, index] for row, index in enumerate(which)]
    assert [list(output.outputs[0].token_ids) for output in found] == want
    return [output.num_cached_tokens for output in found]


@pytest.mark.parametrize("options", [{}, {"deterministic": True, "async_scheduling": True}],
                         ids=["plain", "deterministic"])  # fmt: skip
@pytest.mark.parametrize("level", [1, 2])
def test_requests_with_adapters_go_on_after_a_sleep(adapted, level, options):
    """Adapters in slots and others that the engine holds; prefixes are shared by adapter again."""
    with adapted.llm(**options) as llm:
        engine = llm.llm_engine
        checked(llm, adapted, adapted.which)
        names = engine.list_loras()
        for which in (adapted.which, adapted.which[::-1]):
            products = engine.model.decoder.adapters.products.values()
            slots = [weakref.ref(array) for product in products for _, array in product.arrays()]
            del products
            llm.sleep(level)
            gc.collect()
            assert len(slots) > 6 and not any(ref() is not None for ref in slots)
            assert engine.list_loras() == names
            llm.wake_up()
            assert checked(llm, adapted, which) == [0] * len(which)
            assert sum(checked(llm, adapted, which)) > 0


def test_slots_of_adapters_are_free_without_garbage_collection(adapted, monkeypatch):
    """`Model` alone: its slots hold the same adapters afterwards, and rows have the same logits."""
    options = {"device": "cpu", "enable_lora": True, "max_loras": 3, "progress": False}
    model = load(adapted.base, **options)
    for slot, index in enumerate((2, 0)):
        model.write_adapter(model.read_adapter(f"a{index}", adapted.folders[index]), 1 + slot)

    def logits():
        cache = model.new_cache(3, 8, adapter_slots=[2, None, 1])
        return model.step([[5, 9, 2, 7]] * 3, cache)

    want = logits()
    kinds = model.adapter_kinds
    assert np.abs(want[1:] - want[:-1]).max() > 0.1
    monkeypatch.setattr("engine.model.gc.collect", lambda: pytest.fail("some arrays were alive"))
    gc.disable()
    try:
        for level in (1, 2, 1):
            model.sleep(level)
            model.wake_up()
            assert np.array_equal(logits(), want) and model.adapter_kinds == kinds
            assert model.num_adapter_writes == 2  # engines need not write them again
    finally:
        gc.enable()
    assert model.num_adapter_slots == 3


@pytest.mark.parametrize("level", [1, 2])
def test_kinds_of_weights_stay(adapted, tmp_path, level):
    """Also those that no adapter in a slot changes: the same products read the adapters."""
    model = load(adapted.base, device="cpu", enable_lora=True, max_loras=1, progress=False)
    pairs = {
        "model.layers.0.self_attn.q_proj.weight": (np.ones((4, 32), "f4"), np.ones((64, 4), "f4"))
    }
    model.write_adapter(model.read_adapter("a0", adapted.folders[0]), 0)
    model.write_adapter(model.read_adapter("q", write_adapter(tmp_path / "q", pairs, 4)), 0)
    kinds = model.adapter_kinds
    model.sleep(level)
    model.wake_up()
    assert model.adapter_kinds == kinds == ("down", "gate_up", "o", "qkv")


@pytest.mark.parametrize("level", [1, 2])
def test_new_weights_before_a_sleep(adapted, level):
    """Level 1 keeps them, level 2 reads the checkpoint again; adapters stay with both."""
    request = adapted.request(1)
    with adapted.llm() as llm:
        engine = llm.llm_engine
        first = adapted.prompts[:1]
        assert tokens_of(llm, first, [request]) == [adapted.want[0, 1]]
        engine.update_weights(str(adapted.base.parent / "merged0"))
        both = tokens_of(llm, first, [request])
        llm.sleep(level)
        with pytest.raises(EngineError, match="asleep, wake it up first"):
            engine.update_weights(str(adapted.base))
        llm.wake_up()
        if level == 2:
            assert tokens_of(llm, first, [request]) == [adapted.want[0, 1]] != both
            engine.update_weights(str(adapted.base.parent / "merged0"))
        assert tokens_of(llm, first, [request]) == both
        assert tokens_of(llm, first, [None]) == [adapted.want[0, 0]]
        engine.update_weights(str(adapted.base))
        assert tokens_of(llm, first, [request]) == [adapted.want[0, 1]]


@pytest.mark.parametrize("level", [1, 2])
def test_adapters_are_removed_and_replaced_but_not_read_while_asleep(adapted, level):
    with adapted.llm() as llm:
        engine = llm.llm_engine
        checked(llm, adapted, adapted.which)
        ready = engine.read_lora(adapted.request(3))
        llm.sleep(level)
        for load_inplace in (False, True):
            with pytest.raises(
                EngineError, match=r"the adapter cannot be read: .* asleep"
            ) as caught:
                engine.add_lora(
                    LoRARequest("new", 9, adapted.folders[2]), load_inplace=load_inplace
                )
            assert not isinstance(caught.value, RequestError)
        assert "new" not in engine.list_loras()
        engine.add_lora(adapted.request(0))  # held already
        engine.add_lora(LoRARequest("early", 9, adapted.folders[3]), adapter=ready)
        engine.remove_lora("a1")
        llm.wake_up()
        assert "a1" not in engine.list_loras()
        requests = [LoRARequest("early"), adapted.request(0), adapted.request(1), None]
        want = [adapted.want[row, index] for row, index in enumerate((3, 0, 1, -1))]
        assert tokens_of(llm, adapted.prompts[:4], requests) == want


def test_a_sleep_waits_for_an_adapter_that_is_read(adapted, monkeypatch):
    """The read refers to the weights, whose memory would not become free."""
    with adapted.llm() as llm:
        engine = llm.llm_engine
        read, sleep = engine.model.read_adapter, engine.model.sleep
        is_reading, may_read, order = threading.Event(), threading.Event(), []

        def slowly(*arguments):
            is_reading.set()
            assert may_read.wait(60)
            found.append(read(*arguments))
            order.append("read")
            return found[0]

        def noted(level):
            order.append("asleep")
            sleep(level)

        found = []
        monkeypatch.setattr(engine._adapters, "_read", slowly)
        monkeypatch.setattr(engine.model, "sleep", noted)
        reader = threading.Thread(target=engine.read_lora, args=(adapted.request(0),))
        sleeper = threading.Thread(target=llm.sleep)
        reader.start()
        assert is_reading.wait(60)
        sleeper.start()
        sleeper.join(0.2)  # time in which it would sleep at once
        may_read.set()
        reader.join(60)
        sleeper.join(60)
        assert order == ["read", "asleep"] and llm.is_sleeping
        llm.wake_up()
        engine.add_lora(adapted.request(0), adapter=found[0])
        assert tokens_of(llm, adapted.prompts[:1], [LoRARequest("a0")]) == [adapted.want[0, 0]]


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_with_adapters_that_cannot_wake_up_sleeps_on(adapted, level, monkeypatch):
    """The slots have no room, or the pages; nothing is lost."""
    with adapted.llm() as llm:
        checked(llm, adapted, adapted.which)
        llm.sleep(level)

        def full(*_, **__):
            raise OutOfMemoryError("the device is full")

        for target, name in ((AdapterSlots, "restore"), (llm_engine, "KVCache")):
            with monkeypatch.context() as patch:
                patch.setattr(target, name, full)
                with pytest.raises(OutOfMemoryError, match="the device is full"):
                    llm.wake_up()
            assert llm.is_sleeping
        llm.wake_up()
        checked(llm, adapted, adapted.which)


@pytest.mark.gpu
@pytest.mark.parametrize("level", [1, 2])
def test_graphs_with_adapters_are_captured_anew(adapted, level):
    if not resolve_device("auto")[0].is_cuda:
        pytest.skip("no GPU")
    with adapted.llm(device="cuda") as llm:
        model = llm.llm_engine.model
        pool = model.device.xp.get_default_memory_pool()
        for which in (adapted.which, adapted.which[::-1]):
            checked(llm, adapted, which)
            graphs = llm.llm_engine.runner.graphs
            slots = model.decoder.adapters.num_bytes
            before = pool.used_bytes()
            llm.sleep(level)
            assert pool.used_bytes() <= before - slots and llm.llm_engine.runner.graphs is None
            llm.wake_up()
            assert llm.llm_engine.runner.graphs is not graphs
            checked(llm, adapted, which)


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
    engine.sleep()
    with pytest.raises(ConfigError, match="level must be 1 or 2; got 3"):
        engine.sleep(3)
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


@pytest.mark.parametrize("where", ["weights", "pages", "states"])
def test_an_engine_that_cannot_wake_up_sleeps_on(where, monkeypatch):
    engine = make_engine(tiny_model(config=HYBRID, deterministic=True))
    want, _ = served(engine, "a")
    used = engine._pool.used
    engine.sleep()

    def full(*_, **__):
        raise OutOfMemoryError("the device is full")

    with monkeypatch.context() as patch:
        if where == "weights":
            patch.setattr(parked_decoder, "Decoder", full)
        elif where == "states":  # there is room for the pages before them
            patch.setattr(engine._pool, "limit", used - 1)
        else:
            patch.setattr(llm_engine, "KVCache", full)
        for _ in range(2):
            with pytest.raises(OutOfMemoryError, match=r"the device is full|limit is reached"):
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


def test_sleep_after_a_request_that_ended_early():
    """Its next step is still in flight then: the host learns of the end a step later."""
    model = tiny_model()
    tokens = greedy_alone(model, [5, 6, 7], 8, eos=False)
    stop = [token for i, token in enumerate(tokens) if token not in tokens[:i]][-1]
    options = {"temperature": 0.0, "max_tokens": 50, "ignore_eos": True}
    params = SamplingParams(**options, stop_token_ids=[stop])
    with make_llm(model, async_scheduling=True) as llm:
        for _ in range(2):
            llm.generate([{"prompt_token_ids": [5, 6, 7]}], params)
            assert llm.llm_engine.has_unfinished_requests()
            llm.sleep()
            assert not llm.llm_engine.has_unfinished_requests()
            llm.wake_up()
