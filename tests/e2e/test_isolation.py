"""Steps that fail repeatedly: only the faulty request ends with an error."""

from __future__ import annotations

import random

import numpy as np
import pytest

from engine import SamplingParams
from engine.core.fault_bisection import FaultBisection
from tests.e2e.tiny import VOCAB, greedy_alone, make_engine, run, swap_gb, tiny_model

PILL = VOCAB - 1  # only in prompts that are to fail
MAX_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(params=[False, True], ids=["sync", "late"])
def late(request):
    return request.param


def _prompts(rng, count, longest=60):
    return [[rng.randrange(PILL) for _ in range(rng.randint(2, longest))] for _ in range(count)]


def _poison(monkeypatch, model, token, position=None):
    """Make every forward pass raise that computes `token` (at `position`, if given)."""
    forward = type(model).forward

    def broken(self, batch, pages):
        is_pill = np.asarray(batch.token_ids) == token
        if position is not None:
            is_pill &= np.asarray(batch.positions) == position
        if is_pill.any():
            raise RuntimeError("bad pill")
        return forward(self, batch, pages)

    monkeypatch.setattr(type(model), "forward", broken)


def _serve(engine, prompts, params=GREEDY):
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, params)
    outputs = {}
    for _ in range(3000):
        if not engine.has_unfinished_requests():
            assert not engine._recovery.num_suspects and not engine._recovery.is_bisecting
            return [outputs[str(index)].outputs[0] for index in range(len(prompts))]
        outputs.update((o.request_id, o) for o in engine.step())
        engine.check_integrity()
    raise AssertionError("no end")


def _check(model, prompts, completions, guilty):
    for index, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        want = greedy_alone(model, prompt, MAX_TOKENS, eos=False)
        if index in guilty:
            assert completion.finish_reason == "error", index
            assert completion.stop_reason == "the step failed twice: RuntimeError: bad pill"
            assert list(completion.token_ids) == want[: len(completion.token_ids)]
        else:
            assert (completion.finish_reason, list(completion.token_ids)) == ("length", want), index


@pytest.mark.parametrize("place", [0, 3, 40])
@pytest.mark.parametrize("caching", [True, False])
def test_only_the_faulty_request_fails(model, monkeypatch, late, place, caching):
    """The fault is anywhere in its prompt: in the first chunk, and in a later one."""
    prompts = _prompts(random.Random(place), 6)
    prompts[2] = [*prompts[2][:20], *range(30)]
    prompts[2][place] = PILL
    engine = make_engine(
        model,
        async_scheduling=late,
        max_num_seqs=6,
        max_num_batched_tokens=16,
        enable_prefix_caching=caching,
    )
    with monkeypatch.context() as patch:
        _poison(patch, model, PILL, place)
        completions = _serve(engine, prompts)
    _check(model, prompts, completions, {2})
    assert engine.stats().request_success == {"error": 1, "length": 5}


@pytest.mark.parametrize("position", [1, 30])
def test_a_step_that_fails_when_it_is_read(model, monkeypatch, late, position):
    """As when a device reports a fault: after the next step was launched."""
    prompts = _prompts(random.Random(position), 6)
    prompts[3] = list(range(40))
    engine = make_engine(model, async_scheduling=late, max_num_seqs=6, max_num_batched_tokens=24)
    read = engine.runner.read

    def broken(step, *args):
        for s in step.output.sequences:
            if s.request.request_id == "3" and s.start <= position < s.context_len:
                raise RuntimeError("bad pill")
        return read(step, *args)

    monkeypatch.setattr(engine.runner, "read", broken)
    _check(model, prompts, _serve(engine, prompts), {3})


@pytest.mark.parametrize("number", [0, 4, 9])
def test_a_request_that_fails_while_it_decodes(model, monkeypatch, late, number):
    prompts = _prompts(random.Random(number), 6)
    alone = [greedy_alone(model, prompt, MAX_TOKENS, eos=False) for prompt in prompts]
    token, position = alone[3][number], len(prompts[3]) + number
    # Others that happen to have the token there are faulty, too; a last token is not computed.
    sequences = [[*prompt, *ids[:-1]] for prompt, ids in zip(prompts, alone, strict=True)]
    guilty = {i for i, ids in enumerate(sequences) if ids[position : position + 1] == [token]}
    engine = make_engine(model, async_scheduling=late, max_num_seqs=6, max_num_batched_tokens=64)
    with monkeypatch.context() as patch:
        _poison(patch, model, token, position)
        completions = _serve(engine, prompts)
    assert 3 in guilty
    _check(model, prompts, completions, guilty)
    assert list(completions[3].token_ids) == alone[3][: number + 1]


@pytest.mark.parametrize("seed", range(12))
def test_several_faulty_requests_in_a_tiny_pool(model, monkeypatch, late, seed):
    rng = random.Random(seed)
    prompts = _prompts(rng, 10)
    guilty = set(rng.sample(range(10), rng.randint(1, 4)))
    for index in guilty:
        prompts[index][rng.randrange(len(prompts[index]))] = PILL
    swaps = rng.random() < 0.5
    engine = make_engine(
        model,
        async_scheduling=late,
        max_model_len=96,
        num_blocks=6 + rng.choice([0, 3]),
        max_num_seqs=rng.choice([1, 3, 9]),
        max_num_batched_tokens=rng.choice([9, 24, 100]),
        scheduling_policy=rng.choice(["fcfs", "lpm"]),
        enable_prefix_caching=rng.random() < 0.7,
        watermark=0.0,
        preemption_mode="swap" if swaps else "recompute",
        swap_space_gb=swap_gb(8) if swaps else 0.0,
    )
    with monkeypatch.context() as patch:
        _poison(patch, model, PILL)
        # Greedy answers may contain the pill, too: then their request is faulty as well.
        completions = _serve(engine, prompts)
    for index, prompt in enumerate(prompts):
        if PILL in greedy_alone(model, prompt, MAX_TOKENS, eos=False)[:-1]:
            guilty.add(index)
    _check(model, prompts, completions, guilty)


def test_bisection_takes_few_steps(model, monkeypatch, late):
    prompts = [[index % PILL, 5 + index] for index in range(64)]
    prompts[37] = [PILL, 7]
    engine = make_engine(
        model, async_scheduling=late, max_num_seqs=64, max_num_batched_tokens=200, num_blocks=200
    )
    with monkeypatch.context() as patch:
        _poison(patch, model, PILL, 0)
        completions = _serve(engine, prompts)
    _check(model, prompts, completions, {37})
    # The step, its repetition, and one half at each of six levels.
    assert engine.stats().num_step_failures == 2 + 6


def test_a_step_that_is_too_large_is_split(model, monkeypatch, late):
    """No request is faulty: all together do not fit, but each part does."""
    prompts = _prompts(random.Random(1), 6, longest=12)
    engine = make_engine(model, async_scheduling=late, max_num_seqs=6, max_num_batched_tokens=99)
    forward = type(model).forward

    def narrow(self, batch, pages):
        if len(batch.context_lens) > 2:
            raise MemoryError("three are too many")
        return forward(self, batch, pages)

    with monkeypatch.context() as patch:
        patch.setattr(type(model), "forward", narrow)
        completions = _serve(engine, prompts)
    _check(model, prompts, completions, set())


def test_requests_added_and_aborted_during_bisection(model, monkeypatch, late):
    prompts = _prompts(random.Random(5), 6)
    prompts[4][1] = PILL
    engine = make_engine(model, async_scheduling=late, max_num_seqs=6, max_num_batched_tokens=300)
    outputs = {}
    with monkeypatch.context() as patch:
        _poison(patch, model, PILL, 1)
        for index, prompt in enumerate(prompts[:5]):
            engine.add_request(str(index), prompt, GREEDY)
        while not engine._recovery.is_bisecting:
            outputs.update((o.request_id, o) for o in engine.step())
        engine.abort_request("0")
        engine.add_request("5", prompts[5], GREEDY)
        outputs |= run(engine, num_failures=engine.stats().num_step_failures + 2)
    assert outputs["0"].outputs[0].finish_reason == "abort"
    _check(model, prompts[1:], [outputs[str(i)].outputs[0] for i in range(1, 6)], {3})


def test_continuations_of_a_faulty_prompt_fail_alone(model, monkeypatch, late):
    prompts = _prompts(random.Random(2), 3)
    engine = make_engine(model, async_scheduling=late, max_num_seqs=8, max_num_batched_tokens=300)
    engine.add_request("bad", [5, PILL, 7], SamplingParams(n=3, max_tokens=4))
    with monkeypatch.context() as patch:
        _poison(patch, model, PILL, 1)
        completions = _serve(engine, prompts)
    _check(model, prompts, completions, set())
    assert engine.stats().request_success == {"error": 1, "length": 3}


def test_a_transient_fault_leaves_no_suspects(model, monkeypatch, late):
    """After a transient fault all requests are cleared, and none is suspected in the next one."""
    engine = make_engine(model, async_scheduling=late, max_num_seqs=6, max_num_batched_tokens=200)
    prompts = _prompts(random.Random(3), 6)
    launch, calls = engine.runner.launch, iter(range(10**6))

    def broken(output):
        if next(calls) % 3 == 2:
            raise RuntimeError("now and then")
        return launch(output)

    monkeypatch.setattr(engine.runner, "launch", broken)
    _check(model, prompts, _serve(engine, prompts), set())


def test_a_bisection_begins_without_suspects():
    bisection = FaultBisection()
    assert not bisection.num_suspects and not bisection.is_active
    assert list(bisection.groups()) == []
