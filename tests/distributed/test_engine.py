"""Engines whose model several processes share: the same outputs as one process, and faults."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from engine import LLM, LLMEngine, SamplingParams
from engine.distributed import processes
from engine.errors import ConfigError, EngineError, RankError, RequestError
from engine.loading.hf_config import config_from_dict
from engine.speculative.costs import measure_step_costs
from tests.distributed.engines import (
    CONFIG,
    LONGROPE,
    add_every_kind_of_request,
    is_alive,
    make_engine,
    run,
)
from tests.distributed.golden import GOLDEN, write_checkpoint

MOE = "qwen3_moe"


def _engine(size, **options):
    return make_engine(tensor_parallel_size=size, **options)


def _pids(engine):
    return engine.model.driver.processes.pids


@pytest.fixture(scope="module")
def moe_folder(tmp_path_factory):
    return str(write_checkpoint(MOE, tmp_path_factory.mktemp(MOE)))


@pytest.mark.parametrize(
    ("is_async", "config"), [(False, CONFIG), (True, CONFIG), (True, LONGROPE)]
)
def test_every_kind_of_request(is_async, config):
    """Random and greedy ones, log-probabilities, penalties, biases, masks and processors."""
    found = {}
    for size in (1, 2):
        with _engine(size, config=config, async_scheduling=is_async) as engine:
            add_every_kind_of_request(engine)
            found[size] = run(engine)
    assert found[2] == found[1]


def test_a_checkpoint_of_experts_on_four_ranks(moe_folder):
    found = {}
    for size in (1, 4):
        with _engine(size, model=moe_folder) as engine:
            for index in range(3):
                params = SamplingParams(max_tokens=12, temperature=0.0)
                engine.add_request(str(index), [5 + index, 17, 3, 99], params)
            found[size] = run(engine)
            load = engine.stats().expert_load
    assert found[4] == found[1]
    assert load


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preemption_and_shared_prefixes(mode):
    """Few blocks: requests are preempted, recomputed or swapped, and share what is cached."""
    options = {"num_blocks": 14, "preemption_mode": mode, "debug": True}
    options |= {"swap_space_gb": 0.01} if mode == "swap" else {}
    found, preempted = {}, {}
    for size in (1, 2):
        with _engine(size, **options) as engine:
            for index in range(6):
                params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
                engine.add_request(f"r{index}", [1, 2, 3] * 7 + [index % 3] * 5, params)
            found[size] = run(engine)
            preempted[size] = engine.stats().scheduler.num_preemptions
    assert found[2] == found[1]
    assert preempted[2] == preempted[1] > 0


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_drafts_from_the_text_itself(method):
    """Drafts, "suffix"'s in trees, are verified by all ranks, which move accepted slots, too."""
    found = {}
    for size in (1, 2):
        speculative = {"method": method, "num_speculative_tokens": 4, "adaptive": False}
        options = {"deterministic": method == "ngram", "speculative_config": speculative}
        with _engine(size, **options) as engine:
            for index in range(3):
                params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
                engine.add_request(f"r{index}", [4, 5, 6, 7] * 6 + [index], params)
            found[size] = run(engine)
            assert engine.stats().speculation.num_draft_tokens
    assert found[2] == found[1]


def test_drafts_of_a_model_that_rank_0_has_whole(tmp_path):
    folder = str(write_checkpoint("llama", tmp_path))
    found = {}
    for size in (1, 2):
        speculative = {"method": "draft_model", "model": folder, "num_speculative_tokens": 3}
        speculative["adaptive"] = False
        with _engine(size, model=folder, speculative_config=speculative) as engine:
            for index in range(3):
                params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
                engine.add_request(f"r{index}", [4, 5, 6, 7, index], params)
            found[size] = run(engine)
            assert engine.stats().speculation.num_accepted_tokens
    assert found[2] == found[1]


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_steps_of_decode_graphs(num_drafts):
    """On the CPU their kernels are launched one by one, from the buffers that rank 0 sends."""
    found, options = {}, {}
    if num_drafts:
        speculative = {"method": "ngram", "num_speculative_tokens": num_drafts}
        options["speculative_config"] = {**speculative, "adaptive": False}
    for size in (1, 2):
        with _engine(size, **options) as engine:
            limits = engine.config.scheduler
            engine.runner.capture_graphs(limits.max_model_len, limits.max_draft_tokens)
            # Speculation repeats steps to see what they cost.
            lens = sorted({1, 1 + num_drafts})
            sizes = limits.max_num_seqs, limits.max_num_batched_tokens
            measure_step_costs(engine.runner, lens, *sizes)
            for index in range(6):
                params = SamplingParams(
                    max_tokens=20 + index,
                    temperature=0.5 * (index % 2),
                    seed=index,
                    logprobs=1 if index == 3 else None,
                    ignore_eos=True,
                )
                engine.add_request(f"r{index}", [1 + index, 2, 3, 4] * 5, params)
            found[size] = run(engine)
            if size == 2:
                assert ", as a graph)" in engine.model.describe_ranks()
    assert found[2] == found[1]


def test_beams_and_a_forked_request():
    found = {}
    for size in (1, 2):
        with _engine(size) as engine:
            engine.add_request("a", [1, 2, 3] * 6, SamplingParams(max_tokens=30, temperature=0.0))
            for _ in range(5):
                engine.step()
            engine.add_request(
                "b", [1, 2, 3] * 6, SamplingParams(max_tokens=5, temperature=0.0), parent="a"
            )
            found[size] = run(engine)
    assert found[2] == found[1]


@pytest.mark.parametrize("codes", ["fp8", "int8"])
def test_pages_of_codes(codes):
    found = {}
    for size in (1, 2):
        with _engine(size, kv_cache_dtype=codes) as engine:
            engine.add_request("a", [1, 2, 3] * 6, SamplingParams(max_tokens=20, temperature=0.0))
            found[size] = run(engine)
    assert found[2] == found[1]


def test_requests_that_are_aborted_leave_the_others_as_they_are():
    with _engine(2) as engine:
        for index in range(4):
            params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
            engine.add_request(f"r{index}", [index + 1] * 20, params)
        for _ in range(6):
            engine.step()
        engine.abort_request(["r1", "r3"])
        found = run(engine)
    with _engine(1) as engine:
        for index in (0, 2):
            params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
            engine.add_request(f"r{index}", [index + 1] * 20, params)
        alone = run(engine)
    assert {name: found[name] for name in alone} == alone
    assert found["r1"][0][2] == "abort"


def test_random_operations():
    """Requests come, end and are aborted at random; blocks are few."""
    rng, found = np.random.default_rng(0), {}
    plan = [
        (int(rng.integers(3)), int(rng.integers(1, 60)), int(rng.integers(1, 25)))
        for _ in range(60)
    ]
    for size in (1, 2):
        with _engine(size, num_blocks=20, swap_space_gb=0.001, debug=True) as engine:
            outputs, alive = {}, []
            for turn, (what, length, count) in enumerate(plan):
                if what == 0 and alive:
                    engine.abort_request([alive.pop(length % len(alive))])
                if what != 1:
                    params = SamplingParams(
                        max_tokens=count, temperature=0.5 * (turn % 2), seed=turn, ignore_eos=True
                    )
                    ids = [(turn * i * i) % 7 for i in range(length)]
                    engine.add_request(f"r{turn}", ids, params, priority=turn % 3)
                    alive.append(f"r{turn}")
                for output in engine.step():
                    outputs[output.request_id] = output.outputs[0].token_ids
                engine.check_integrity()
            found[size] = outputs, run(engine)
    assert found[2] == found[1]


def test_llm_generates_with_two_ranks_that_have_whole_experts(moe_folder):
    """And counts the tokens of all 7 experts, of which rank 0 has 3."""
    texts, loads = [], []
    for size in (1, 2):
        options = {"tensor_parallel_size": size, "enable_expert_parallel": True, "num_blocks": 64}
        with LLM(moe_folder, device="cpu", deterministic=True, **options) as llm:
            prompts = [[1, 2, 3], [4, 5, 6, 7]]
            outputs = llm.generate(prompts, SamplingParams(max_tokens=6, temperature=0.0))
            texts.append([output.outputs[0].token_ids for output in outputs])
            loads.append(llm.llm_engine.stats())
    assert texts[0] == texts[1]
    one, two = loads
    assert two.expert_load == one.expert_load and one.rank_load == {}
    for layer, load in two.expert_load.items():
        assert two.rank_load[layer] == (sum(load[:3]), sum(load[3:]))


def test_chunks_that_end_no_prompt():
    """No row leaves the last layer in such a step; each KV head is on two of the ranks."""
    found = {}
    for size in (1, 4):
        with _engine(size, max_num_batched_tokens=8) as engine:
            params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
            engine.add_request("a", list(range(20)), params)
            found[size] = run(engine)
    assert found[4] == found[1]


def _greedy(engine):
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    engine.add_request("a", [5, 17, 3], params)
    return run(engine)


def test_new_weights_are_read_when_the_call_returns(tmp_path, monkeypatch):
    """Their folder may be gone then. Its path is that of this process, which changed its folder."""
    base = write_checkpoint("llama", _folder(tmp_path / "base"))
    found = {}
    for size in (1, 2):
        with _engine(size, model=str(base)) as engine:
            new = write_checkpoint("llama", _folder(tmp_path / "new"))
            tensors = load_file(new / "model.safetensors")
            halves = {name: tensor / 2 for name, tensor in tensors.items()}
            save_file(halves, new / "model.safetensors")
            old = _greedy(engine)
            monkeypatch.chdir(tmp_path)
            engine.update_weights("new")
            shutil.rmtree(new)
            found[size] = old, _greedy(engine)
    assert found[2] == found[1]
    assert found[1][0] != found[1][1]


def test_new_weights_that_one_rank_cannot_read_change_nothing(tmp_path, monkeypatch):
    base = write_checkpoint("llama", tmp_path)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setattr("engine.parallel.tensor.TARGET", "rank_targets:without_new_files")
    with _engine(2, model=str(base)) as engine:
        old = _greedy(engine)
        with pytest.raises(RequestError, match=r"is not on this disk \(rank 1\)"):
            engine.update_weights(base)
        assert _greedy(engine) == old


def test_new_weights_may_take_longer_than_a_collective(tmp_path, monkeypatch):
    base = write_checkpoint("llama", tmp_path)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setattr("engine.parallel.tensor.TARGET", "rank_targets:write_late")
    with _engine(2, model=str(base), collective_timeout=2.0) as engine:
        start = time.monotonic()
        engine.update_weights(base)
        assert time.monotonic() - start > 2.5
        assert _greedy(engine)


def _folder(path):
    path.mkdir(exist_ok=True)
    return path


# ---- faults


def _started(size=2, **options):
    engine = _engine(size, **options)
    params = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
    engine.add_request("a", [1, 2, 3], params)
    for _ in range(3):
        engine.step()
    return engine


def _steps_until_error(engine, seconds=12.0):
    start = time.monotonic()
    while time.monotonic() - start < seconds:
        engine.step()
    raise AssertionError("no error")


@pytest.mark.kills
def test_a_killed_rank_ends_the_group():
    engine = _started(4)
    pids = _pids(engine)
    os.kill(pids[1], signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(RankError, match=r"rank 2 was killed by SIGKILL; it was last in: "):
        _steps_until_error(engine)
    assert time.monotonic() - start < 10
    assert not any(map(is_alive, pids))
    with pytest.raises(RankError, match="the ranks have ended; rank 2 was killed"):
        engine.step()
    engine.close()


@pytest.mark.kills
def test_no_rank_is_left_when_the_error_comes(monkeypatch):
    """Also where another thread is ending them, and they do not end by themselves."""
    end_processes = processes.end_processes

    def end_slowly(others, seconds):
        for other in others:
            if other.poll() is None:
                os.kill(other.pid, signal.SIGSTOP)
        time.sleep(0.5)
        end_processes(others, 0.1)

    monkeypatch.setattr(processes, "end_processes", end_slowly)
    engine = _started(4)
    pids = _pids(engine)
    os.kill(pids[1], signal.SIGKILL)
    deadline = time.monotonic() + 60
    while not engine.model.driver.processes.group.is_closing and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(RankError, match="rank 2 was killed by SIGKILL"):
        engine.step()
    assert not any(map(is_alive, pids))
    engine.close()


@pytest.mark.kills
def test_a_rank_that_is_killed_while_nothing_runs_ends_the_group():
    with _engine(4) as engine:
        pids = _pids(engine)
        os.kill(pids[0], signal.SIGKILL)
        deadline = time.monotonic() + 60
        while any(map(is_alive, pids)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(map(is_alive, pids))
        with pytest.raises(RankError, match="rank 1 was killed by SIGKILL"):
            engine.model.check_ranks()
        engine.add_request("a", [1], SamplingParams(max_tokens=2))
        with pytest.raises(RankError, match="rank 1 was killed by SIGKILL"):
            engine.step()


@pytest.mark.kills
def test_a_stopped_rank_is_named_after_the_time_out():
    engine = _started(collective_timeout=1.5)
    [pid] = _pids(engine)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(RankError, match=r"rank 1 \(in: .*\) did not come to .* within 1.5 s"):
        _steps_until_error(engine)
    assert not is_alive(pid)
    engine.close()


@pytest.mark.kills
def test_an_error_of_rank_0_in_a_step_ends_the_group(monkeypatch):
    engine = _started()
    [pid] = _pids(engine)
    monkeypatch.setattr(engine.model.decoder, "final_norm", None)
    with pytest.raises(RankError, match=r"rank 0 failed in step \d+ .*NoneType"):
        engine.step()
    assert not is_alive(pid)
    engine.close()


@pytest.mark.kills
def test_a_closed_engine_leaves_no_process():
    engine = _started(4)
    pids = _pids(engine)
    engine.close()
    assert not any(map(is_alive, pids))
    engine.close()


@pytest.mark.kills
def test_a_forgotten_engine_leaves_no_process():
    engine = _started(2)
    pids = _pids(engine)
    del engine
    import gc

    gc.collect()
    assert not any(map(is_alive, pids))


@pytest.mark.kills
def test_the_watchdog_says_what_ranks_are_doing():
    with _started(2) as engine:
        assert "rank 1 is in: " in engine.model.describe_ranks()


def test_an_error_at_load_is_told(tmp_path):
    folder = write_checkpoint("stablelm", tmp_path)
    with pytest.raises(EngineError, match="num_attention_heads must be a multiple of 4 shards"):
        _engine(4, model=str(folder), deterministic=False)


def test_a_rank_without_room_for_its_weights_is_told(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setattr("engine.parallel.tensor.TARGET", "rank_targets:out_of_memory")
    with pytest.raises(RankError, match=r"rank 1 failed(?s:.)*cuda:1 has no room for 8.00 GiB"):
        _engine(2)


def test_a_damaged_file_is_told(tmp_path):
    folder = write_checkpoint("llama", tmp_path)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(EngineError, match="safetensors"):
        _engine(2, model=str(folder))


def test_different_files_on_ranks_are_found(on_ranks, tmp_path):
    from engine.parallel.rank import compare_ranks

    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"name": name}))

    def compare(collectives):
        name = "ab"[collectives.rank == 2]
        compare_ranks(collectives._group, str(tmp_path / name), {"dtype": "float32"})

    with pytest.raises(RankError, match=r"rank 2 differs from rank 0 in the content of c"):
        on_ranks(3, compare)


# ---- what is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 0}, r"tensor_parallel_size must be a whole number in \[1, 64\]"),
        ({"collective_timeout": 0.0}, "collective_timeout must be"),
        (
            {"tensor_parallel_size": 2, "enable_expert_parallel": True},
            "enable_expert_parallel must be False for a model without experts: llama is dense",
        ),
        ({"enable_expert_parallel": 1}, "enable_expert_parallel must be True or False; got 1"),
    ],
)
def test_options_that_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        LLMEngine.from_name("x", config=CONFIG, load_format="dummy", device="cpu", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "the width of an expert must be a multiple of 8 shards; got 20"),
        ({"pipeline_parallel_size": 2}, "the width of an expert must be a multiple of 8 shards"),
        (
            {"enable_expert_parallel": True},
            "experts must be at least 8, one for each rank .* got 7",
        ),
    ],
)
def test_a_model_that_cannot_be_divided_starts_no_process(
    monkeypatch, moe_folder, options, message
):
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process started"))
    with pytest.raises(ConfigError, match=message):
        _engine(8, model=moe_folder, **options)


def test_a_loaded_model_is_not_divided_afterwards():
    import engine as package

    model = package.load(config=CONFIG, load_format="dummy", device="cpu")
    with pytest.raises(ConfigError, match="tensor_parallel_size must be 1, the number of proc"):
        LLMEngine(model, tensor_parallel_size=2)


def test_the_config_is_the_same_in_json():
    from engine.loading.config_json import config_from_json, config_to_json

    windowed = replace(CONFIG, rope_local=CONFIG.rope, layer_windows=(0, 5), eos_token_ids=(1, 2))
    cases = ("falcon_h1", "qwen3_next", "lfm2", "bailing_moe_v2_5", "deepseek_v3", "gemma3n")
    records = (
        json.loads((GOLDEN / f"models/{case}.json").read_text()) for case in (*cases, "gemma4")
    )
    for config in (windowed, *(config_from_dict(record["config"]) for record in records)):
        assert config_from_json(json.loads(json.dumps(config_to_json(config)))) == config
