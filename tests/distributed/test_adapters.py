"""LoRA adapters in several processes: what each holds, and that no step waits for files."""

from __future__ import annotations

import contextlib
import gc
import shutil
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file

import engine as package
from engine import LoRARequest
from engine.cache.kv_cache import KVCache, KVGeometry
from engine.distributed.group import Group, GroupEnded
from engine.distributed.messages import Messages, pack, unpack
from engine.distributed.segment import Segment
from engine.errors import ConfigError, RankError, RequestError, WeightsError
from engine.layers.batch import ForwardBatch
from engine.layers.lora import NO_ADAPTER
from engine.loading.lora import LoraAdapter
from engine.parallel.adapters import HeldAdapters, SharedAdapters
from engine.parallel.tensor import DriverRank
from engine.weights import Stage
from tests.distributed.golden import write_checkpoint
from tests.lora_files import (
    Served,
    adaptable,
    random_adapter,
    tokens_of,
    write_adapter,
)

FAMILIES = (
    "llama",
    "gemma3",
    "gemma4_experts",
    "mimo_v2_flash_new_keys",
    "deepseek_v3",
    "qwen3_5_text",
    "bailing_hybrid",
    "nemotron_h",
)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    return Served(tmp_path_factory.mktemp("served"))


def until(is_true):
    deadline = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


# ---- stages of a model


@pytest.mark.parametrize("case", FAMILIES)
def test_logits_of_stages(case, tmp_path):
    """Each stage reads its layers; a batch has two adapters, and a row without one."""
    options = {"device": "cpu", "progress": False, "enable_lora": True, "max_loras": 3}
    path = write_checkpoint(case, tmp_path)
    whole = package.load(path, **options)
    stages = [Stage.of(index, 2, whole.config.num_layers) for index in range(2)]
    parts = [package.load(path, stage=stage, **options) for stage in stages]
    tensors = load_file(path / "model.safetensors")
    names = adaptable(whole, tensors)
    found = {}
    for slot, chosen in enumerate((names, names[1::2])):
        pairs = random_adapter(chosen, tensors, 4 + slot, seed=slot)
        biases = {chosen[0]: np.ones(len(tensors[chosen[0]]), np.float32)}
        folder = write_adapter(tmp_path / f"a{slot}", pairs, 4 + slot, biases=biases)
        for model in (whole, *parts):
            adapter = model.read_adapter(f"a{slot}", folder)
            found[slot, model] = adapter.matrices
            model.write_adapter(adapter, 2 * slot)
    for stage, part in zip(stages, parts, strict=True):
        want = {
            stage.local_name(name): arrays
            for name, arrays in found[0, whole].items()
            if stage.has(name, is_tied=False)
        }
        assert found[0, part].keys() == want.keys() and want
        for name, arrays in want.items():
            assert all(map(np.array_equal, found[0, part][name], arrays))
    geometries = [KVGeometry.of_model(m.config, m.dtype) for m in (whole, *parts, whole)]
    pages = [KVCache(each, 3, num_slots=3 * each.has_states) for each in geometries]
    prompts = [[5, 17, 3, 99, 41, 8, 2], [9, 8, 7, 6, 5, 4, 3], [1, 2, 3, 4, 5, 6, 7]]
    rows = np.array([2, NO_ADAPTER, 0], np.int32)
    for ids, starts in ((prompts, [0, 0, 0]), ([[3], [4], [7]], [7, 7, 7])):
        slots = np.arange(3, dtype=np.int32) if geometries[0].has_states else None
        batch = ForwardBatch.build(
            ids, starts, [[0], [1], [2]], 16, state_slots=slots, adapter_slots=rows
        )
        want = whole.forward(batch, pages[0].layers)
        entering = parts[0].run_stage(batch, pages[1].layers)
        got = parts[1].forward(replace(batch, entering=entering), pages[2].layers)
        np.testing.assert_allclose(got, want, atol=1e-5 * float(want.std()))
        alone = whole.forward(replace(batch, adapter_slots=None), pages[3].layers)
        assert np.abs(alone - want)[[0, 2]].max() > 0.01 * want.std()


@pytest.mark.parametrize("layer", [0, 1])
def test_the_stage_of_a_module_refuses_it(layer, tmp_path, served):
    """A module too large in the first or the last stage; the other one reads its part."""
    module = f"model.layers.{layer}.self_attn.q_proj.weight"
    pairs = {module: (np.ones((32, 32), "f4"), np.ones((64, 32), "f4"))}
    folder = write_adapter(tmp_path / "large", pairs, 32)
    stage = Stage.of(layer, 2, 2)
    model = package.load(
        served.base, device="cpu", progress=False, enable_lora=True, stage=stage, max_lora_rank=8
    )
    with pytest.raises(WeightsError, match=rf"layers\.{layer}\.self_attn.* has rank 32"):
        model.read_adapter("large", folder)


# ---- engines of stages


@pytest.mark.parametrize(
    "options",
    [
        {"async_scheduling": True, "max_num_batched_tokens": 16, "max_num_seqs": 16},
        {"num_blocks": 14, "swap_space_gb": 0.1, "preemption_mode": "swap"},
        {"max_loras": 1},
        {"tensor_parallel_size": 2},
    ],
    ids=["chunks", "swap", "one slot", "two ranks each"],
)
def test_tokens_of_the_merged_models(in_threads, served, options):
    with served.llm(pipeline_parallel_size=2, **options) as llm:
        served.check(llm, served.which)
        served.check(llm, served.which[::-1])


def test_steps_go_on_while_a_stage_reads(in_threads, served, monkeypatch):
    """The adapter may be used once all stages have it; a removed one is forgotten everywhere."""
    may_read, readers, held = threading.Event(), [], []
    read = package.model.Model.read_adapter
    follow = HeldAdapters.follow

    def slowly(self, name, path):
        if self.decoder.stage.is_first and name == "slow":
            readers.append(threading.current_thread())
            assert may_read.wait(60)
        return read(self, name, path)

    def noted(self, numbers, arrays):
        held[:] = [self]
        follow(self, numbers, arrays)

    monkeypatch.setattr(package.model.Model, "read_adapter", slowly)
    monkeypatch.setattr(HeldAdapters, "follow", noted)
    with served.llm(pipeline_parallel_size=2) as llm:
        core = llm.llm_engine
        served.check(llm, [0] * len(served.which))
        request, found = LoRARequest("slow", 9, served.folders[1]), []
        thread = threading.Thread(target=lambda: found.append(core.read_lora(request)))
        thread.start()
        until(lambda: readers)
        served.check(llm, [0] * len(served.which))  # steps of all stages
        assert not found and thread.is_alive()
        may_read.set()
        thread.join(60)
        core.add_lora(request, adapter=found.pop())
        assert tokens_of(llm, served.prompts[:1], [LoRARequest("slow")]) == [served.want[0, 1]]
        assert len(held[0]._held) == 2
        core.remove_lora("a0")
        served.check(llm, [2] * len(served.which))  # both slots have had other adapters
        served.check(llm, [3] * len(served.which))
        served.check(llm, [2] * len(served.which))
        gc.collect()
        served.check(llm, [2] * len(served.which))  # its first step tells the stage
        until(lambda: len(held[0]._held) == 3)
        assert len(core.list_loras()) == 3


def test_a_stage_that_cannot_read_an_adapter(in_threads, served, monkeypatch):
    """The files are not on its host, say: the request is refused, and the engine goes on."""
    read = package.model.Model.read_adapter

    def broken(self, name, path):
        if self.decoder.stage.is_first and name == "bad":
            raise ConfigError(f"adapter 'bad': {path} must be a folder")
        return read(self, name, path)

    monkeypatch.setattr(package.model.Model, "read_adapter", broken)
    with served.llm(pipeline_parallel_size=2) as llm:
        with pytest.raises(
            RequestError, match=r"adapter 'bad': /.*a0 must be a folder \(stage 0\)"
        ):
            tokens_of(llm, served.prompts[:1], [LoRARequest("bad", 9, served.folders[0])])
        assert llm.llm_engine.list_loras() == ()
        served.check(llm, served.which)


# ---- ranks


def test_a_rank_whose_files_are_gone(served, tmp_path, monkeypatch):
    """Two processes: the second cannot read what the first has read. Steps go on."""
    folder = Path(shutil.copytree(served.folders[0], tmp_path / "gone"))
    share = SharedAdapters.share

    def without_files(self, adapter):
        if adapter.name == "gone":
            shutil.rmtree(folder)
        share(self, adapter)

    monkeypatch.setattr(SharedAdapters, "share", without_files)
    with served.llm(tensor_parallel_size=2) as llm:
        core = llm.llm_engine
        with pytest.raises(RequestError, match=r"adapter 'gone': .*must be a folder .* \(rank 1\)"):
            core.add_lora(LoRARequest("gone", 9, folder))
        served.check(llm, served.which)
        # No rank reads files in a step: those of adapters that it holds may be gone.
        path = Path(shutil.copytree(served.folders[1], tmp_path / "held"))
        core.add_lora(LoRARequest("held", 10, path))
        shutil.rmtree(path)
        assert tokens_of(llm, served.prompts[:1], [LoRARequest("held")]) == [served.want[0, 1]]


class Ranks:
    """Rank 0, and a thread that is rank 1; `reads` holds the events that allow each read."""

    def __init__(self):
        segment = Segment.in_process(2)
        self.group, group = (Group(segment, rank) for rank in range(2))
        sent, received = Messages(self.group), Messages(group)
        self.reads = {}
        self.written, self.steps = [], []
        model = SimpleNamespace(read_adapter=self._read, write_adapter=self._write)
        self.held = HeldAdapters(model, group.answer)
        self.adapters = SharedAdapters(
            lambda numbers, arrays: sent.send(pack(1, numbers, arrays)),
            partial(self.group.answers, what="an adapter"),
        )
        self.step = lambda number: sent.send(pack(0, [number], []))

        def follow():
            with contextlib.suppress(GroupEnded):
                while True:
                    kind, numbers, arrays = unpack(received.receive())
                    self.held.follow(numbers, arrays) if kind else self.steps.append(numbers)

        self._thread = threading.Thread(target=follow, daemon=True)
        self._thread.start()

    def _read(self, name, path):
        assert self.reads.get(name, SimpleNamespace(wait=lambda _: True)).wait(60)
        if name == "bad":
            raise WeightsError("x" * 5000)
        return f"{name} of {path}"

    def _write(self, adapter, slot):
        self.written.append((adapter, slot))

    def close(self):
        self.held.close()
        self.group.close()
        self._thread.join(60)


@pytest.fixture
def ranks():
    made = Ranks()
    yield made
    made.close()


def adapter_of(name, serial):
    return LoraAdapter(name, Path("/adapters", name), 4, {}, serial)


def test_a_rank_follows_steps_while_it_reads(ranks):
    ranks.reads["a"] = threading.Event()
    shared = []

    def share():
        ranks.adapters.share(adapter := adapter_of("a", 7))
        shared.append(adapter)

    thread = threading.Thread(target=share, daemon=True)
    thread.start()
    for number in range(20):  # more than the ring of messages has slots
        ranks.step(number)
    until(lambda: len(ranks.steps) == 20)
    assert not shared and not ranks.held._held
    ranks.reads["a"].set()
    thread.join(60)
    ranks.adapters.write(shared[0], 3)
    until(lambda: ranks.written)
    assert ranks.written == [("a of /adapters/a", 3)]
    ranks.adapters.free_dropped()
    ranks.step(20)
    until(lambda: len(ranks.steps) == 21)
    assert ranks.held._held
    shared.clear()
    gc.collect()
    ranks.adapters.free_dropped()
    until(lambda: not ranks.held._held)


def test_an_error_of_a_rank_is_cut(ranks):
    with pytest.raises(WeightsError, match=r"^x{2047} \(1\)$"):
        ranks.adapters.share(adapter_of("bad", 1))
    gc.collect()
    ranks.adapters.share(adapter := adapter_of("b", 2))  # the error is not reported again
    assert list(ranks.held._held) == [adapter.serial]


def test_an_interrupted_call_is_forgotten(ranks, monkeypatch):
    """Its answer is not taken for the next one's, and its adapter is dropped."""
    ranks.reads["a"] = threading.Event()

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ranks.adapters, "_answers", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ranks.adapters.share(adapter_of("a", 1))
    gc.collect()
    ranks.adapters.free_dropped()
    threading.Timer(0.05, ranks.reads["a"].set).start()
    ranks.adapters.share(adapter := adapter_of("b", 2))
    assert list(ranks.held._held) == [2]
    ranks.adapters.write(adapter, 0)
    until(lambda: ranks.written == [("b of /adapters/b", 0)])


@pytest.mark.parametrize(("error", "ends"), [(KeyboardInterrupt, False), (RankError, True)])
def test_only_a_failed_rank_ends_the_group_of_a_read(ranks, monkeypatch, error, ends):
    closed = []
    processes = SimpleNamespace(group=ranks.group, close=lambda: closed.append(True))
    collectives = SimpleNamespace(abort=tuple, close=tuple)
    driver = DriverRank(processes, collectives)

    def fail(*_):
        raise error("rank 1 has not been heard of")

    monkeypatch.setattr(ranks.group, "answers", fail)
    with pytest.raises(error, match="rank 1 has not been heard of"):
        driver.adapter_errors(1)
    assert bool(closed) == bool(ranks.group.failure) == ends


def test_a_driver_that_ends_does_not_wait(ranks):
    ranks.reads["a"] = threading.Event()
    errors = []

    def share():
        try:
            ranks.adapters.share(adapter_of("a", 1))
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=share, daemon=True)
    thread.start()
    until(lambda: ranks.held._thread is not None)
    ranks.group.close()
    thread.join(60)
    assert [type(error) for error in errors] == [GroupEnded]
    ranks.reads["a"].set()
