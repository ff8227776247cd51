"""Faults in and around a step: the engine survives and reports which requests failed."""

from __future__ import annotations

import gc
import logging
import time
import tracemalloc

import numpy as np
import pytest

from engine import LLMEngine, SamplingParams
from engine.core.watchdog import Watchdog
from engine.errors import ContractError, EngineError, OutOfMemoryError, StepTimeoutError
from engine.models.mock_model import MockModel
from engine.runner.model_runner import LaunchedStep
from engine.sampling_params import RequestOutputKind
from tests.e2e.tiny import (
    VOCAB,
    check_drained,
    greedy_alone,
    make_engine,
    run,
    swap_gb,
    tiny_model,
)

PROMPTS = [list(range(4 + i, 30 + 2 * i)) for i in range(6)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(params=[False, True], ids=["sync", "late"])
def late(request):
    return request.param


def _engine(model, **options):
    engine = make_engine(model, **options)
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(str(index), prompt, GREEDY)
    return engine


def _break(monkeypatch, owner, name, faults):
    """Make the calls of `owner.name` whose numbers are keys of `faults` raise its values."""
    original, calls = getattr(owner, name), iter(range(10**9))

    def broken(*args, **kwargs):
        error = faults.get(next(calls))
        if error is not None:
            raise error
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, broken)


def _assert_all_as_alone(model, outputs):
    for index, prompt in enumerate(PROMPTS):
        assert list(outputs[str(index)].outputs[0].token_ids) == greedy_alone(
            model, prompt, 12, eos=False
        )


@pytest.mark.parametrize("part", ["launch", "read", "sampler", "forward"])
@pytest.mark.parametrize("number", [0, 1, 5, 9])
@pytest.mark.parametrize("options", [{}, {"num_blocks": 9, "max_model_len": 64}])
def test_a_step_that_fails_once_is_recomputed(
    model, monkeypatch, late, part, number, options, caplog
):
    swap = {"swap_space_gb": swap_gb(8), "preemption_mode": "swap", "watermark": 0.0}
    engine = _engine(model, async_scheduling=late, **options, **(swap if options else {}))
    owner = {"forward": type(model), "sampler": engine.runner}.get(part, engine.runner)
    fault = OutOfMemoryError("no memory for this step")
    _break(monkeypatch, owner, part, {number: fault})
    with caplog.at_level(logging.WARNING, "engine"):
        outputs = run(engine, num_failures=1)
    _assert_all_as_alone(model, outputs)
    assert "failed and is undone" in caplog.text and "no memory for this step" in caplog.text
    assert engine.stats().num_step_failures == 1
    assert engine.stats().request_success == {"length": 6}


@pytest.mark.parametrize("part", ["swap_blocks_to_cpu", "swap_blocks_from_cpu"])
@pytest.mark.parametrize("is_done", [False, True])
def test_blocks_of_a_failed_swap_are_recomputed(model, monkeypatch, late, part, is_done):
    """Every fourth swap raises, before or after copying; its blocks are recomputed."""
    engine = _engine(
        model,
        async_scheduling=late,
        num_blocks=9,
        max_model_len=64,
        swap_space_gb=swap_gb(8),
        preemption_mode="swap",
        watermark=0.0,
    )
    original, calls = getattr(engine._swap, part), iter(range(10**9))

    def broken(pairs):
        fails = bool(pairs) and next(calls) % 4 == 0
        if is_done or not fails:
            original(pairs)
        if fails:
            engine.kv_cache.slab[:, :, [pair[part.endswith("from_cpu")] for pair in pairs]] = np.nan
            raise OutOfMemoryError("no memory for a swap")

    monkeypatch.setattr(engine._swap, part, broken)
    outputs = {}
    while engine.has_unfinished_requests():
        outputs.update((o.request_id, o) for o in engine.step())
        engine.check_integrity()
    _assert_all_as_alone(model, outputs)
    assert engine.stats().num_step_failures > 0


def test_the_engine_survives_repeated_separate_failures(model, monkeypatch, late):
    engine = _engine(model, async_scheduling=late)
    _break(monkeypatch, engine.runner, "launch", {n: MemoryError("m") for n in range(2, 60, 4)})
    outputs = {}
    while engine.has_unfinished_requests():
        outputs.update((o.request_id, o) for o in engine.step())
        engine.check_integrity()
    _assert_all_as_alone(model, outputs)
    assert engine.stats().num_step_failures >= 5


def test_a_failure_of_another_kind_is_logged_with_its_traceback(model, monkeypatch, late, caplog):
    engine = _engine(model, async_scheduling=late)
    errors = [MemoryError("m"), MemoryError("m"), RuntimeError("n")]
    _break(monkeypatch, engine.runner, "launch", dict(enumerate(errors, 2)))
    while engine.has_unfinished_requests():
        engine.step()
    failures = [one for one in caplog.records if "failed and is undone" in one.getMessage()]
    assert [bool(one.exc_info) for one in failures] == [True, False, True]


def test_requests_of_a_step_that_fails_twice_fail_alone(model, monkeypatch, late, caplog):
    engine = make_engine(model, async_scheduling=late, max_num_seqs=2, max_num_batched_tokens=99)
    prompts = [[96, 5], [96, 6], *PROMPTS[2:]]
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, GREEDY)
    forward = type(model).forward

    def broken(self, batch, pages):
        if ((batch.token_ids == 96) & (batch.positions == 0)).any():
            raise RuntimeError("bad pill")
        return forward(self, batch, pages)

    monkeypatch.setattr(type(model), "forward", broken)
    # The step, its repetition, and each of its two requests alone.
    outputs = run(engine, num_failures=4)
    monkeypatch.undo()
    failures = [one for one in caplog.records if "failed and is undone" in one.getMessage()]
    assert [bool(one.exc_info) for one in failures] == [True, False, False, False]
    for name in ("0", "1"):
        completion = outputs[name].outputs[0]
        assert completion.finish_reason == "error"
        assert completion.stop_reason == "the step failed twice: RuntimeError: bad pill"
    for index in range(2, 6):
        ids = list(outputs[str(index)].outputs[0].token_ids)
        assert ids == greedy_alone(model, PROMPTS[index], 12, eos=False)
    assert engine.stats().request_success == {"error": 2, "length": 4}


def test_an_interrupt_leaves_the_engine_consistent(model, monkeypatch, late):
    engine = _engine(model, async_scheduling=late)
    _break(monkeypatch, engine.runner, "launch", {3: KeyboardInterrupt()})
    _break(monkeypatch, engine.runner, "read", {4: KeyboardInterrupt()})
    outputs, interrupts = {}, 0
    while engine.has_unfinished_requests():
        try:
            outputs.update((o.request_id, o) for o in engine.step())
        except KeyboardInterrupt:
            interrupts += 1
        engine.check_integrity()
    assert interrupts == 2
    _assert_all_as_alone(model, outputs)


def test_closing_frees_the_memory_although_the_step_in_flight_fails(model, monkeypatch):
    engine = _engine(model, async_scheduling=True)
    engine.step()
    assert engine._in_flight
    _break(monkeypatch, engine.runner, "read", {0: RuntimeError("a fault of the device")})
    engine.close()
    assert engine.kv_cache.is_closed and not engine._in_flight
    assert not engine.has_unfinished_requests()


class _BrokenTokenizer:
    special_ids, strip_left, max_token_chars, eos_token_ids = frozenset(), 0, 4, ()

    def __init__(self):
        self.bad_id = None

    def encode(self, text, add_special_tokens=True):
        return [int(word) for word in text.split()]

    def token_bytes(self, token_id):
        if token_id == self.bad_id:
            raise UnicodeError("bad vocabulary")
        return b"%d " % token_id


@pytest.mark.parametrize("scored", [{}, {"logprobs": -1, "prompt_logprobs": -1}], ids=len)
@pytest.mark.parametrize("kind", ["CUMULATIVE", "FINAL_ONLY", "DELTA"])
def test_a_tokenizer_that_raises_fails_its_request_only(model, monkeypatch, late, kind, scored):
    tokenizer = _BrokenTokenizer()
    monkeypatch.setattr(type(model), "has_tokenizer", True)
    monkeypatch.setitem(model.__dict__, "tokenizer", tokenizer)
    bad, good = [5, 6, 7], [8, 9]
    bad_ids = greedy_alone(model, bad, 12, eos=False)
    good_ids = greedy_alone(model, good, 12, eos=False)
    tokenizer.bad_id = next(i for i in bad_ids[2:] if i not in good_ids)
    engine = make_engine(model, async_scheduling=late)
    params = SamplingParams(
        temperature=0, max_tokens=12, ignore_eos=True, output_kind=RequestOutputKind[kind], **scored
    )
    engine.add_request("bad", bad, params)
    engine.add_request("good", good, params)
    outputs, pieces = {}, []
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs[output.request_id] = output
            pieces += [output.outputs[0].text] * (output.request_id == "good")
    check_drained(engine)
    completion = outputs["bad"].outputs[0]
    assert completion.finish_reason == "error"
    assert completion.stop_reason == "the tokenizer raised UnicodeError: bad vocabulary"
    text = "".join(pieces) if kind == "DELTA" else pieces[-1]
    assert text == "".join(f"{i} " for i in good_ids)
    assert engine.stats().request_success == {"error": 1, "length": 1}
    if scored:
        last = outputs["good"].outputs[0].logprobs[-1]
        assert len(last) == VOCAB
        assert {i for i in last if last[i].decoded_token is None} == {tokenizer.bad_id}


def test_the_watchdog_reports_a_stuck_step(model, monkeypatch, caplog):
    engine = _engine(model, step_timeout=2)
    forward, calls = type(model).forward, iter(range(10**9))

    def slow(self, batch, pages):
        if next(calls) == 2:
            while not caplog.records:
                time.sleep(0.01)
        return forward(self, batch, pages)

    monkeypatch.setattr(type(model), "forward", slow)
    with caplog.at_level(logging.ERROR, "engine"):
        outputs = run(engine)
    _assert_all_as_alone(model, outputs)
    [record] = caplog.records
    text = record.getMessage()
    assert "step_timeout is 2 s" in text and "unfinished requests: ['0'" in text
    assert "in slow" in text, "the stack shows where it hangs"
    assert engine.stats().num_stuck_steps == 1
    engine.close()


def test_the_watchdog_outlives_a_state_that_cannot_be_read(caplog):
    """The stepping thread may change the state while the watchdog reads it."""
    states = iter([RuntimeError("dictionary changed size during iteration"), None])

    def describe():
        error = next(states)
        if error is not None:
            raise error
        return "the state"

    dog = Watchdog(0.05, describe)
    with caplog.at_level(logging.ERROR, "engine"):
        for number in (1, 2):
            with dog:
                deadline = time.monotonic() + 10
                while dog.num_stuck < number or len(caplog.records) < number:
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
    dog.close()
    first, second = (record.getMessage() for record in caplog.records)
    assert "dictionary changed size" in first and "the state" in second


def test_the_watchdog_may_abandon_a_stuck_step(model, monkeypatch, late):
    engine = _engine(model, step_timeout=0.5, raise_on_timeout=True, async_scheduling=late)
    forward, calls = type(model).forward, iter(range(10**9))

    def slow(self, batch, pages):
        if next(calls) == 2:
            time.sleep(1.0)
        return forward(self, batch, pages)

    monkeypatch.setattr(type(model), "forward", slow)
    outputs = {}
    with pytest.raises(StepTimeoutError, match=r"longer than step_timeout=0.5 s"):
        while engine.has_unfinished_requests():
            outputs.update((o.request_id, o) for o in engine.step())
    engine.check_integrity()
    outputs |= run(engine)
    _assert_all_as_alone(model, outputs)
    engine.close()


@pytest.mark.parametrize("graphs", [False, True])
def test_debug_mode_finds_a_wrong_block_table_before_the_launch(model, monkeypatch, graphs):
    engine = make_engine(model)
    if graphs:
        engine.runner.capture_graphs(64)
    engine.add_request("r", PROMPTS[0], GREEDY)
    for _ in range(2):  # the prompt's chunks
        engine.step()
    engine.runner._table.block_tables[0, 0] += 1
    if graphs:
        monkeypatch.setattr(engine.runner.graphs, "launch", _never)
    monkeypatch.setattr(type(model), "forward", _never)
    with pytest.raises(EngineError, match=r"block table of request 'r' must be \[0, 1\]"):
        engine.step()


@pytest.mark.parametrize("wrong", ["rows", "starts"])
def test_debug_mode_finds_wrong_rows_and_positions(model, wrong):
    engine = make_engine(model)
    engine.add_request("r", PROMPTS[0], GREEDY)
    for _ in range(5):
        engine.step()
    step_id, rows, starts = engine.runner._last_step
    engine.runner._last_step = step_id, rows + (wrong == "rows"), starts + (wrong == "starts")
    with pytest.raises(EngineError, match="rows and positions must be"):
        engine.step()


def test_debug_mode_finds_a_wrong_block_copy(model, monkeypatch):
    engine = make_engine(model)
    engine.add_request("r", PROMPTS[0], GREEDY)
    schedule = engine.scheduler.schedule

    def wrong(excluded=()):
        output = schedule(excluded)
        output.copies.append((0, 64))
        return output

    monkeypatch.setattr(engine.scheduler, "schedule", wrong)
    with pytest.raises(ContractError, match=r"block copies must hold block ids in \[0, 64\)"):
        engine.step()


def _never(*args, **kwargs):
    raise AssertionError("this is not to be reached")


def test_freed_blocks_are_poisoned_in_debug_mode(model):
    engine = make_engine(model, enable_prefix_caching=False)
    engine.add_request("r", PROMPTS[0], GREEDY)
    run(engine)
    engine.add_request("s", [5], GREEDY)
    engine.step()
    slab = engine.kv_cache.slab
    [request] = engine.scheduler.unfinished_requests()
    freed = set(range(3)) - set(request.block_table)
    assert freed and all((slab[:, :, b] != slab[:, :, b]).all() for b in freed)


@pytest.mark.slow
def test_ten_thousand_short_requests_leak_nothing():
    model = MockModel(vocab_size=64, max_model_len=64)
    engine = LLMEngine(model, max_num_seqs=64, max_num_batched_tokens=512, num_blocks=200)

    def serve(count):
        for index in range(count):
            prompt = [index % 64, (index // 64) % 64, 5]
            engine.add_request(str(index), prompt, SamplingParams(max_tokens=2), timeout=1e6)
            while engine.num_unfinished_requests > 100:
                for output in engine.step():
                    ids = output.outputs[0].token_ids
                    prompt = list(output.prompt_token_ids)
                    assert list(ids) == model.continuation(prompt, len(ids))
        run(engine)

    serve(1000)
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.take_snapshot()
    serve(9000)
    gc.collect()
    grown = tracemalloc.take_snapshot().compare_to(before, "filename")
    tracemalloc.stop()
    ours = sum(d.size_diff for d in grown if "/engine/" in d.traceback[0].filename)
    assert ours < 64 << 10, [str(d) for d in grown[:5]]
    assert engine.stats().request_success == {"length": 10_000}
    assert engine.stats().generation_tokens == 20_000


def test_a_block_that_a_failed_step_did_not_write_is_not_reused(model, monkeypatch):
    """A step in flight commits a chunk of a request that was restarted with the same chunk."""
    prompt = [7 * i % 90 + 5 for i in range(120)]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    engine = make_engine(model, async_scheduling=True, debug=False)
    launch, read = engine.runner.launch, engine.runner.read
    count, lost = iter(range(10**6)), []

    def failing_launch(output):
        number = next(count)
        if number == 1:
            raise MemoryError("launch")
        step = launch(output) if number != 2 else LaunchedStep(output)  # computes nothing
        lost.extend([step] if number == 2 else ())
        return step

    def failing_read(step, *rest):
        if step in lost:
            raise MemoryError("device")
        return read(step, *rest)

    monkeypatch.setattr(engine.runner, "launch", failing_launch)
    monkeypatch.setattr(engine.runner, "read", failing_read)
    found = {}
    for name in ("first", "second"):
        engine.add_request(name, prompt, params)
        while engine.has_unfinished_requests():
            found.update((output.request_id, output.outputs[0]) for output in engine.step())
    assert lost and found["second"].finish_reason == "length"
    assert list(found["second"].token_ids) == greedy_alone(model, prompt, 8, eos=False)
