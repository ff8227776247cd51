"""Pipelines: the same outputs as one process, steps that overlap, and faults."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import engine as package
from engine import LLMEngine, SamplingParams
from engine.cache.kv_cache import KVCache, KVGeometry
from engine.cli import main
from engine.core.resolve import resolve
from engine.distributed.connection import connect
from engine.distributed.messages import to_text
from engine.distributed.peer import FAIL
from engine.errors import (
    ConfigError,
    DeviceError,
    EngineError,
    RankError,
    RequestError,
    StepTimeoutError,
)
from engine.layers.batch import ForwardBatch
from engine.parallel.activations import ActivationSender
from engine.parallel.stage import HELLO, LINK, run_stage
from engine.parallel.stage_group import _CODE, StageGroup
from engine.text import child_process
from engine.text.child_process import descendants
from engine.weights import Stage
from tests.distributed.engines import CONFIG as TWO_LAYERS
from tests.distributed.engines import (
    LONGROPE,
    add_every_kind_of_request,
    is_alive,
    make_engine,
    run,
)
from tests.distributed.golden import CASES, write_checkpoint

CONFIG = replace(TWO_LAYERS, num_layers=4)
SECRET = b"a secret of a test"


def _engine(stages, **options):
    return make_engine(pipeline_parallel_size=stages, **({"config": CONFIG} | options))


# ---- stages of a model


def test_layers_are_divided_evenly():
    for count, num_layers in ((1, 1), (2, 5), (3, 7), (4, 4), (7, 30)):
        stages = [Stage.of(index, count, num_layers) for index in range(count)]
        assert [s.first for s in stages] == [0, *(s.last for s in stages[:-1])]
        assert stages[-1].last == num_layers
        sizes = [s.last - s.first for s in stages]
        assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)
    with pytest.raises(ConfigError, match="pipeline_parallel_size must be at most 2, the layers"):
        Stage.of(0, 3, 2)


def test_layers_are_divided_as_asked():
    stages = [Stage.of(index, 3, 7, (1, 4, 2)) for index in range(3)]
    assert [(s.first, s.last) for s in stages] == [(0, 1), (1, 5), (5, 7)]
    assert [s.is_last for s in stages] == [False, False, True]
    with pytest.raises(
        ConfigError, match=r"pipeline_layers must add up to 7, the layers; got 3 \+"
    ):
        Stage.of(0, 2, 7, (3, 5))


@pytest.mark.parametrize("case", CASES)
def test_logits_of_every_family(case, tmp_path):
    """Prompts, tokens after them, and one token alone, whose layers may be fused."""
    path, count = write_checkpoint(case, tmp_path), 2
    whole = package.load(path, device="cpu", progress=False)
    num_layers = whole.config.num_layers
    stages = [Stage.of(index, count, num_layers) for index in range(count)]
    if whole.config.per_layer_input is not None:
        with pytest.raises(ConfigError, match=r"pipeline stages are not supported for gemma\d"):
            package.load(path, device="cpu", progress=False, stage=stages[0])
        return
    parts = [package.load(path, device="cpu", progress=False, stage=each) for each in stages]
    assert [part.config.num_layers for part in parts] == [s.last - s.first for s in stages]
    assert "lm_head" not in parts[0].decoder.weights and "embed" not in parts[1].decoder.weights
    geometries = [KVGeometry.of_model(m.config, m.dtype) for m in (whole, *parts)]
    pages = [KVCache(each, 2, num_slots=2 * each.has_states) for each in geometries]
    prompts = [[5, 17, 3, 99, 41, 8, 2, 60, 77, 12, 1], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 11]]
    tables = [[0], [1]]
    for ids, starts in ((prompts, [0, 0]), ([[3], [4]], [11, 11]), ([[7]], [12])):
        slots = np.arange(len(ids), dtype=np.int32) if geometries[0].has_states else None
        batch = ForwardBatch.build(ids, starts, tables[: len(ids)], 16, state_slots=slots)
        want = whole.forward(batch, pages[0].layers)
        entering = parts[0].run_stage(batch, pages[1].layers)
        got = parts[1].forward(replace(batch, entering=entering), pages[2].layers)
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("quantization", ["fp8", "int8", "q8_0"])
def test_quantized_stages_have_the_weights_of_the_whole(quantization, tmp_path):
    """With q8_0 a tied output layer has another format than the embedding."""
    path = write_checkpoint("llama_tied_new_keys", tmp_path)
    options = {"device": "cpu", "progress": False, "quantization": quantization}
    whole = package.load(path, **options).decoder.weights
    found = {}
    for index in range(2):
        stage = Stage.of(index, 2, 2)
        part = package.load(path, stage=stage, **options).decoder.weights
        numbered = {n.replace("layers.0", f"layers.{stage.first}"): w for n, w in part.items()}
        assert not numbered.keys() & found.keys()
        found |= numbered
    assert found.keys() == whole.keys()
    for name, weight in found.items():
        assert weight.format == whole[name].format
        for (_, ours), (_, theirs) in zip(weight.arrays(), whole[name].arrays(), strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_whatever_a_friend_says_first_the_engine_goes_on():
    """Messages of one that knows the secret, but is no stage of this pipeline."""
    group = StageGroup(3, SECRET, ("127.0.0.1", 0))
    hello = {"version": package.__version__, "pid": 1, "port": 1}
    wrong = [
        (HELLO, [], []),
        (HELLO, [0, 1], []),
        (HELLO, [0], []),
        (HELLO, [0], [None]),
        (HELLO, [0], [to_text("[" * 100_000)]),
        (HELLO, [0], [to_text("[]")]),
        (HELLO, [0], [to_text({**hello, "port": "x"})]),
        (HELLO, [0], [to_text({**hello, "version": "0"})]),
        (HELLO, [-1], [to_text(hello)]),
        (HELLO, [2], [to_text(hello)]),
        (LINK, [0], []),
        (99, [1], []),
    ]
    try:
        for kind, numbers, arrays in wrong:
            stranger = connect(group.address, SECRET)
            stranger.send(kind, numbers, arrays)
            with pytest.raises(OSError, match=r"closed|reset"):
                while stranger.receive()[0] == FAIL:
                    pass
            stranger.close()
        assert not group.hellos and group._link is None
        group.check()
        friend = connect(group.address, SECRET)
        friend.send(HELLO, [0], [to_text(hello)])
        deadline = time.monotonic() + 10
        while 0 not in group.hellos:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        friend.close()
    finally:
        group.end()


def test_a_stage_that_connects_as_the_group_ends_is_refused():
    group = StageGroup(3, SECRET, ("127.0.0.1", 0))
    late = connect(group.address, SECRET)
    group.end()
    late.send(HELLO, [0], [to_text({"version": package.__version__, "pid": 1, "port": 1})])
    late._socket.settimeout(5)
    with pytest.raises(OSError, match=r"closed|reset"):
        while late.receive()[0] == FAIL:
            pass
    late.close()
    assert not group.hellos


def test_a_thread_that_cannot_use_its_device_says_so():
    def activate():
        raise DeviceError("the device has failed")

    sender = ActivationSender(None, SimpleNamespace(activate=activate), lambda: None)
    deadline = time.monotonic() + 10
    while sender.error is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert "the device has failed" in str(sender.error)


# ---- engines


@pytest.fixture(scope="module")
def alone():
    """What one process answers to requests of every kind."""
    with _engine(1) as engine:
        add_every_kind_of_request(engine)
        return run(engine)


@pytest.mark.parametrize(
    ("stages", "is_async", "layers"),
    [(2, False, None), (3, False, None), (3, False, (1, 1, 2)), (2, True, None), (2, True, "3,1")],
)
def test_every_kind_of_request(in_threads, alone, stages, is_async, layers):
    """Random and greedy ones, log-probabilities, penalties, biases, masks and processors."""
    options = {"async_scheduling": is_async, "max_num_batched_tokens": 40}
    with _engine(stages, pipeline_layers=layers, **options) as engine:
        sizes = {None: 4 // stages, (1, 1, 2): 2, "3,1": 1}
        assert engine.model.own.config.num_layers == sizes[layers]
        add_every_kind_of_request(engine)
        assert run(engine) == alone


@pytest.mark.parametrize("is_async", [False, True])
def test_longrope(in_threads, is_async):
    """Requests that outgrow their short factors while steps of them are in flight."""
    config = replace(LONGROPE, num_layers=4)
    found = {}
    for stages in (1, 2):
        with _engine(stages, config=config, async_scheduling=is_async, debug=True) as engine:
            add_every_kind_of_request(engine)
            found[stages] = run(engine)
    assert found[2] == found[1]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preemption_and_shared_prefixes(in_threads, mode, is_async):
    """Few blocks: requests in flight are preempted, recomputed or swapped, and share prefixes."""
    options = {"num_blocks": 12, "preemption_mode": mode, "debug": True}
    options |= {"async_scheduling": is_async}
    options |= {"swap_space_gb": 0.01} if mode == "swap" else {}
    found = {}
    for stages in (1, 2):
        with _engine(stages, **(options if stages > 1 else {})) as engine:
            for index in range(5):
                params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
                engine.add_request(f"r{index}", [1, 2, 3] * 7 + [index % 3] * 5, params)
            found[stages] = run(engine)
            stats = engine.stats().scheduler
    assert stats.num_preemptions > 0 and stats.prefix_cache_hits > 0
    assert (stats.num_swaps > 0) == (mode == "swap")
    assert found[2] == found[1]


def test_costs_of_preemption_are_measured_on_all_stages(in_threads):
    options = {"num_blocks": 12, "swap_space_gb": 0.01, "kv_cache_dtype": "fp8"}
    found = {}
    for stages in (1, 2):
        with _engine(stages, **options) as engine:
            assert "measured" in engine.config.reasons["recompute_us_per_token"]
            for index in range(4):
                params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
                engine.add_request(f"r{index}", [index + 1] * 30, params)
            found[stages] = run(engine)
    assert found[2] == found[1]


def test_the_experts_of_all_stages_are_counted(in_threads, tmp_path):
    folder, found, loads = str(write_checkpoint("qwen3_moe", tmp_path)), {}, {}
    for stages in (1, 2):
        with _engine(stages, model=folder, dtype="bfloat16") as engine:
            for index in range(3):
                params = SamplingParams(max_tokens=12, temperature=0.0)
                engine.add_request(str(index), [5 + index, 17, 3, 99], params)
            found[stages] = run(engine)
            loads[stages] = engine.stats().expert_load
    assert found[2] == found[1]
    assert loads[2].keys() == loads[1].keys()
    assert all(np.array_equal(loads[2][layer], loads[1][layer]) for layer in loads[1])


def test_every_stage_has_as_many_blocks_as_the_poorest(in_threads, monkeypatch):
    """Five layers: the first stage has three of them, and its blocks are larger."""

    def poor(config, model, **given):
        found = resolve(config, model, **given)
        return replace(found, scheduler=replace(found.scheduler, num_blocks=40))

    monkeypatch.setattr("engine.parallel.stage.resolve", poor)
    with _engine(2, config=replace(CONFIG, num_layers=5), swap_space_gb=0.01) as engine:
        limits, geometry = engine.config.scheduler, engine.config.geometry
        assert limits.num_host_blocks == int(0.01 * 2**30) // (geometry.bytes_per_block * 3 // 2)
        assert limits.num_blocks == engine.kv_cache.num_blocks == 40
        assert engine.config.reasons["num_blocks"] == "40: the least of 2 stages"


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("drafts", [{}, {"method": "ngram", "prompt_lookup_min": 1}], ids=str)
def test_random_operations(in_threads, drafts, is_async):
    """Requests come, end and are aborted at random; blocks are few."""
    rng, found = np.random.default_rng(0), {}
    plan = [
        (int(rng.integers(3)), int(rng.integers(1, 60)), int(rng.integers(1, 25)))
        for _ in range(40)
    ]
    for stages in (1, 2):
        options = {"speculative_config": drafts | {"adaptive": False}} if drafts else {}
        options = {"async_scheduling": is_async, **options} if stages > 1 else {}
        with _engine(stages, num_blocks=20, swap_space_gb=0.001, debug=True, **options) as engine:
            outputs, alive = {}, []
            for turn, (what, length, count) in enumerate(plan):
                if what == 0 and alive:
                    engine.abort_request([alive.pop(length % len(alive))])
                if what != 1:
                    penalty = 1.2 if turn % 5 == 0 else 1.0
                    params = SamplingParams(
                        max_tokens=count,
                        temperature=0.5 * (turn % 2),
                        seed=turn,
                        ignore_eos=True,
                        repetition_penalty=penalty,
                    )
                    ids = [(turn * i * i) % 7 for i in range(length)]
                    engine.add_request(f"r{turn}", ids, params, priority=turn % 3)
                    alive.append(f"r{turn}")
                for _ in range(2):
                    for output in engine.step():
                        outputs[output.request_id] = output.outputs[0]
                    engine.check_integrity()
            while engine.has_unfinished_requests():
                for output in engine.step():
                    outputs[output.request_id] = output.outputs[0]
            found[stages] = outputs
    assert found[1].keys() == found[2].keys()
    num_whole = 0
    for name, output in found[1].items():
        ours, other = output.token_ids, found[2][name].token_ids
        shorter = min(len(ours), len(other))
        assert ours[:shorter] == other[:shorter]
        if "abort" not in (output.finish_reason, found[2][name].finish_reason):
            assert len(ours) == len(other)
            num_whole += 1
    assert num_whole > 15


@pytest.mark.parametrize("in_threads", ["messages"], indirect=True)
def test_steps_overlap(in_threads, monkeypatch):
    """While one stage computes a step, the stage before it computes a later one.

    With links it is a stream that waits, not the thread that announces the steps.
    """
    spans = {0: [], 1: []}

    def slowed(name, stage):
        inner = getattr(package.model.Model, name)

        def run(self, batch, pages):
            start = time.monotonic()
            time.sleep(0.02)
            result = inner(self, batch, pages)
            spans[stage].append((start, time.monotonic()))
            return result

        monkeypatch.setattr(package.model.Model, name, run)

    with _engine(2) as engine:
        slowed("run_stage", 0), slowed("forward", 1)
        for index in range(4):
            params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
            engine.add_request(str(index), [index + 1] * 3, params)
        sizes = []
        while engine.has_unfinished_requests():
            engine.step()
            sizes.append(len(engine._in_flight))
    assert max(sizes) == 1  # after a step; during one, it is two
    overlapping = [
        first
        for first, (start, end) in enumerate(spans[1])
        for begin, stop in spans[0][first + 1 : first + 2]
        if begin < end and start < stop
    ]
    assert len(overlapping) > len(spans[1]) // 2
    total = sum(end - start for times in spans.values() for start, end in times)
    assert max(e for _, e in spans[1]) - min(s for s, _ in spans[0]) < 0.9 * total


def test_stages_that_were_all_stopped_go_on(in_threads, monkeypatch):
    """As in a container that is paused: none has heard of another for long, and none is lost."""
    real, jumped = time.monotonic, [0.0]
    with _engine(2) as engine:
        monkeypatch.setattr(time, "monotonic", lambda: real() + sum(jumped))
        for _ in range(2):
            jumped.append(100.0)
            time.sleep(1.2)  # all processes look
            engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=4, temperature=0.0))
            assert run(engine)
        engine.model.check_ranks()


# ---- processes


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(write_checkpoint("llama", tmp_path_factory.mktemp("llama")))


SIZES = [(4, 1), (8, 1), (1, 4), (2, 2), (4, 2), (2, 4), (4, 4)]


@pytest.mark.parametrize(("ranks", "stages"), SIZES)
def test_ranks_and_stages_together(alone, ranks, stages):
    """Every combination, in a process each, has the outputs of one process."""
    with _engine(stages, tensor_parallel_size=ranks) as engine:
        add_every_kind_of_request(engine)
        found = run(engine)
    assert found == alone


def _started(stages, **options):
    engine = _engine(stages, **options)
    params = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
    for index in range(3):
        engine.add_request(str(index), [1, 2, index], params)
    for _ in range(5):
        engine.step()
    return engine


def _steps_until_error(engine, seconds=12.0):
    start = time.monotonic()
    while time.monotonic() - start < seconds:
        engine.step()
    raise AssertionError("no error")


@pytest.mark.kills
def test_a_killed_stage_ends_all():
    engine = _started(3)
    pids = engine.model.group.pids
    os.kill(pids[0], signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(RankError, match=r"stage 0 was killed by SIGKILL; it was last in: "):
        _steps_until_error(engine)
    assert time.monotonic() - start < 10
    assert not any(map(is_alive, pids))
    with pytest.raises(RankError, match="stage 0 was killed"):
        engine.step()
    engine.close()


@pytest.mark.kills
def test_a_stopped_stage_is_named_and_killed():
    engine = _started(2, collective_timeout=1.5)
    assert "stage 0 is in: " in engine.model.describe_ranks()
    [pid] = engine.model.group.pids
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(RankError, match=r"stage 0 .*(did not send|has not been heard of)"):
        _steps_until_error(engine)
    assert not is_alive(pid)
    engine.close()


@pytest.mark.kills
def test_a_stopped_rank_of_another_stage_is_killed_with_it():
    """It cannot see that its stage has ended."""
    engine = _started(2, tensor_parallel_size=2, collective_timeout=3.0)
    [stage] = engine.model.group.pids
    [rank] = descendants(stage)
    os.kill(rank, signal.SIGSTOP)
    with pytest.raises(RankError, match=r"stage 0 (?s:.)*rank 1 "):
        _steps_until_error(engine)
    assert not is_alive(stage) and not is_alive(rank)
    engine.close()


@pytest.mark.kills
def test_stages_that_are_left_alone_end(checkpoint):
    """One fails at the start, with its last words; and then nothing is left of the other."""
    (Path(checkpoint).parent / "other").mkdir()
    before = set(_children())
    with pytest.raises(EngineError, match="pipeline_parallel_size must be at most 2, the layers"):
        _engine(3, model=checkpoint)
    with pytest.raises(ConfigError, match="kv_cache_dtype must be 'auto' or 'fp8' with pipeline"):
        _engine(2, model=checkpoint, kv_cache_dtype="int8")
    assert set(_children()) <= before


@pytest.mark.kills
def test_a_stage_ends_with_an_engine_that_is_killed_before_it_connects():
    """It does not wait for an engine to listen that cannot come any more."""
    process = child_process.start(_CODE, dict(os.environ))
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    task = {"address": address, "stage": 0, "secret": SECRET.hex()}
    child_process.send(process.stdin, json.dumps(task).encode())
    process.stdin.close()
    try:
        assert process.wait(30) == 1
    finally:
        process.kill()
        process.stdout.close()


def _children():
    found = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()
    return [int(pid) for pid in found if is_alive(int(pid))]


# ---- faults that threads can have


def test_a_rank_of_the_last_stage_that_fails_at_load_is_named_with_its_stage(
    in_threads, monkeypatch
):
    def load_ranks(*given, **options):
        raise RankError("rank 1 was killed by SIGKILL")

    for module in ("pipeline", "stage"):
        monkeypatch.setattr(f"engine.parallel.{module}.load_ranks", load_ranks)
    monkeypatch.setattr("engine.parallel.stage.StageWorker._load", lambda *given: time.sleep(1))
    with pytest.raises(RankError, match="stage 1 failed while it loaded: rank 1 was killed by"):
        _engine(2, tensor_parallel_size=2)


@pytest.mark.kills
def test_last_words_of_a_stage(in_threads, monkeypatch):
    engine = _started(2)

    def fail(self, batch, pages):
        raise ValueError("a broken layer")

    monkeypatch.setattr(package.model.Model, "run_stage", fail)
    with pytest.raises(RankError, match=r"stage 0 failed; its last words:(?s:.)*a broken layer"):
        _steps_until_error(engine)
    engine.close()


@pytest.mark.kills
def test_an_error_of_the_last_stage_ends_all(in_threads, monkeypatch):
    engine = _started(2)
    monkeypatch.setattr(engine.model.decoder, "final_norm", None)
    with pytest.raises(RankError, match=r"stage 1 failed in step \d+ .*NoneType"):
        _steps_until_error(engine)
    assert engine.model.group.is_closing
    engine.close()


@pytest.mark.kills
def test_a_lost_connection_is_named(in_threads):
    engine = _started(2)
    engine.model.group._peers[0].connection._socket.shutdown(socket.SHUT_RDWR)
    match = r"the connection to stage 0 \(127.0.0.1\) was lost.*it was last in: "
    with pytest.raises(RankError, match=match):
        _steps_until_error(engine)
    engine.close()


def test_aborted_requests_in_flight_leave_the_others_as_they_are(in_threads):
    with _engine(2) as engine:
        for index in range(4):
            params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
            engine.add_request(f"r{index}", [index + 1] * 20, params)
        for _ in range(6):
            engine.step()
        engine.abort_request([f"r{index}" for index in (1, 3)])
        engine.add_request("late", [7] * 20, SamplingParams(max_tokens=9, temperature=0.0))
        found = run(engine)
    with _engine(1) as engine:
        for index in (0, 2):
            params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
            engine.add_request(f"r{index}", [index + 1] * 20, params)
        engine.add_request("late", [7] * 20, SamplingParams(max_tokens=9, temperature=0.0))
        alone = run(engine)
    assert {name: found[name] for name in alone} == alone


@pytest.mark.parametrize("error", [StepTimeoutError, ConnectionError])
def test_steps_in_flight_that_are_rolled_back_are_computed_again(in_threads, monkeypatch, error):
    """A step that has timed out; and one that cannot be laid out, which nobody was told of."""
    found = {}
    for has_failed in (False, True):
        with _engine(3) as engine:
            for index in range(4):
                params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
                engine.add_request(str(index), [index + 1] * 5, params)
            for _ in range(6):
                engine.step()
            assert len(engine._in_flight) == 2
            if has_failed and error is StepTimeoutError:
                monkeypatch.setattr(engine.watchdog, "check", _raising(error))
                with pytest.raises(error):
                    engine.step()
                monkeypatch.undo()
            elif has_failed:
                monkeypatch.setattr(engine.runner, "_rows_and_starts", _raising(error))
                while not engine.stats().num_step_failures:
                    engine.step()
                monkeypatch.undo()
            found[has_failed] = run(engine)
    assert found[True] == found[False]


def _raising(error):
    def fail(*arguments):
        raise error("not this time")

    return fail


# ---- who may take part


def test_unwanted_stages_are_told_why():
    group = StageGroup(2, SECRET, ("127.0.0.1", 0))
    try:
        with pytest.raises(RankError, match=r"stage must be in \[0, 1\); got 1"):
            run_stage(group.address, 1, SECRET)
        with pytest.raises(RankError, match=r"stage 0 did not connect to 127.0.0.1:\d+ within"):
            group.wait_for_stages(0.05)
    finally:
        group.end()


def test_different_files_are_found(in_threads, checkpoint, monkeypatch):
    import engine.parallel.stage as process

    found = process.fingerprint

    def other(name, loading):
        return found(name, loading) | {"the content of config.json": "another"}

    monkeypatch.setattr(process, "fingerprint", other)
    with pytest.raises(
        RankError, match=r"stage 0 differs from the engine in the content of config.json: another"
    ):
        _engine(2, model=checkpoint)


def test_stages_started_by_hand(checkpoint, monkeypatch):
    """As on another host: they wait for the engine, know where the model is, and its secret."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    monkeypatch.setenv("ENGINE_PIPELINE_SECRET", "a secret of sixteen characters")
    key = os.environ["ENGINE_PIPELINE_SECRET"].encode()
    stage = threading.Thread(
        target=run_stage, args=(("127.0.0.1", port), 0, key), kwargs={"model": checkpoint}
    )
    stage.start()
    with _engine(2, model=checkpoint, pipeline_address=f"127.0.0.1:{port}") as engine:
        engine.add_request("a", [1, 2], SamplingParams(max_tokens=4, temperature=0.0))
        found = run(engine)
    stage.join(10)
    assert not stage.is_alive()
    with _engine(1, model=checkpoint) as engine:
        engine.add_request("a", [1, 2], SamplingParams(max_tokens=4, temperature=0.0))
        assert run(engine) == found


def test_the_command_of_a_stage(monkeypatch, capsys):
    monkeypatch.setenv("ENGINE_PIPELINE_SECRET", SECRET.decode())
    group = StageGroup(2, SECRET, ("127.0.0.1", 0))
    try:
        where = f"127.0.0.1:{group.address[1]}"
        for arguments, status, text in (
            (["--connect", where, "--stage", "3"], 1, r"stage must be in [0, 1); got 3"),
            (["--connect", "there", "--stage", "0"], 2, "must be HOST:PORT; got 'there'"),
        ):
            with pytest.raises(SystemExit, match=str(status)):
                main(["stage", *arguments])
            assert text in capsys.readouterr().err
        monkeypatch.setenv("ENGINE_PIPELINE_SECRET", "short")
        with pytest.raises(SystemExit, match="2"):
            main(["stage", "--connect", where, "--stage", "0"])
        assert "at least 16 characters" in capsys.readouterr().err
    finally:
        group.end()


# ---- what is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline_parallel_size": 0}, r"pipeline_parallel_size must be a whole number in"),
        ({"pipeline_address": "a:1"}, "pipeline_address must be left out with one stage"),
        (
            {"pipeline_layers": [4]},
            r"pipeline_layers must be left out with pipeline_parallel_size=1; got \[4\]",
        ),
        (
            {"pipeline_parallel_size": 2, "pipeline_layers": [3]},
            r"pipeline_layers must be 2 numbers, one for each stage .*; got \[3\]",
        ),
        *(
            ({"pipeline_parallel_size": 2, "pipeline_layers": wrong}, "positive integers, such as")
            for wrong in ("3,x", "1_0,2", [0, 3], [1.5, 1.5], "", 3, [True, 3], {1: 3}, b"12")
        ),
        (
            {"pipeline_parallel_size": 2, "pipeline_layers": "3,40"},
            r"pipeline_layers must add up to \d+, the layers; got 3 \+ 40 = 43",
        ),
        (
            {"pipeline_parallel_size": 2, "pipeline_address": "nowhere"},
            "pipeline_address: an address must be HOST:PORT; got 'nowhere'",
        ),
        (
            {"pipeline_parallel_size": 2, "pipeline_address": "127.0.0.1:0"},
            "ENGINE_PIPELINE_SECRET must have at least 16 characters",
        ),
    ],
)
def test_options_that_are_refused(options, message, monkeypatch):
    monkeypatch.delenv("ENGINE_PIPELINE_SECRET", raising=False)
    with pytest.raises(ConfigError, match=message):
        LLMEngine.from_name("x", config=CONFIG, load_format="dummy", device="cpu", **options)


def test_what_the_array_door_cannot_do_is_refused(in_threads):
    with _engine(2) as engine:
        model = engine.model
        with pytest.raises(RequestError, match="kv_scales cannot be set"):
            model.set_kv_scales(np.ones(3))
        with pytest.raises(RequestError, match="kv_scales cannot be read"):
            model.kv_scales  # noqa: B018
        with pytest.raises(RequestError, match="cannot be traced"):
            model.trace([1])
        with pytest.raises(RequestError, match="computes on its engine's pages only"):
            model.step([[1]], model.new_cache(1, 16))
        engine.add_request("a", [1, 2], SamplingParams(max_tokens=2))  # and it still works
        assert run(engine)["a"][0][2] == "length"


def test_a_loaded_model_is_not_divided_afterwards():
    model = package.load(config=CONFIG, load_format="dummy", device="cpu")
    with pytest.raises(ConfigError, match="pipeline_parallel_size must be 1, the number of stag"):
        LLMEngine(model, pipeline_parallel_size=2)
