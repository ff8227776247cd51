"""Features of a request, end to end: n, best_of, logprobs, words, processors, timeouts."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import time
from pathlib import Path

import numpy as np
import pytest

from engine import SamplingParams
from engine.device import to_numpy
from engine.errors import RequestError
from engine.request import RequestStatus
from engine.runner import prompt_logprobs
from engine.sampling_params import RequestOutputKind
from engine.text.tokenizer import load_tokenizer
from tests.e2e.tiny import (
    CONFIG,
    EOS,
    VOCAB,
    Words,
    alone,
    generate,
    greedy_alone,
    make_engine,
    make_llm,
    run,
    swap_gb,
    tiny_model,
)

GOLDEN = json.loads(Path(__file__).parents[1].joinpath("golden/text.json").read_text())
BYTE_LEVEL = GOLDEN["byte_level"]["metadata"] | {"tokenizer.ggml.pre": "gpt-2"}
LONG = [int(i) for i in np.random.default_rng(7).integers(4, VOCAB, 75)]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def model(request):
    # On a GPU, only this mode gives the same tokens in any batch.
    return tiny_model(request.param, deterministic=request.param == "cuda")


@pytest.fixture(params=[False, True], ids=["sync", "late"])
def late(request):
    return request.param


def _log_softmax(logits):
    x = np.asarray(logits, np.float64)
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def _all_logprobs(model, ids):
    logits = model.step(np.array([ids]), model.new_cache(1, len(ids)), logits="all")
    return _log_softmax(to_numpy(logits)[0])


# ---- n and best_of


def test_n_continuations_share_the_prompt(model, late):
    engine = make_engine(model, async_scheduling=late)
    params = SamplingParams(n=3, seed=5, max_tokens=6, ignore_eos=True)
    engine.add_request("r", LONG, params)
    held = []
    outputs = {}
    while engine.has_unfinished_requests():
        outputs.update((o.request_id, o) for o in engine.step())
        stats = engine.scheduler.stats()
        held.append(stats.num_blocks - stats.num_free_blocks - stats.num_cached_blocks)
    completions = outputs["r"].outputs
    assert [c.index for c in completions] == [0, 1, 2]
    assert [list(c.token_ids) for c in completions] == alone(model, LONG, params)
    assert len({tuple(c.token_ids) for c in completions}) == 3
    assert max(held) <= 4 + 3 * 2  # four full blocks shared; a tail and one more block each


def test_more_continuations_than_max_num_seqs(model):
    engine = make_engine(model, max_num_seqs=2)
    params = SamplingParams(n=7, seed=5, max_tokens=20)
    engine.add_request("r", LONG, params)
    ids = [list(c.token_ids) for c in run(engine)["r"].outputs]
    assert ids == alone(model, LONG, params)


def test_the_first_continuation_is_that_of_n_1(model):
    one = generate(model, LONG, SamplingParams(seed=5, max_tokens=6)).outputs[0].token_ids
    three = generate(model, LONG, SamplingParams(n=3, seed=5, max_tokens=6)).outputs
    assert list(three[0].token_ids) == list(one)


def test_a_seed_equal_to_the_engines_gives_no_answer_of_another_request(model):
    """Requests without a seed, and the continuations of one whose seed is the engine's."""
    params = SamplingParams(temperature=1.5, max_tokens=8, ignore_eos=True)
    engine = make_engine(model, seed=0)
    for index in range(6):
        engine.add_request(f"r{index}", LONG, params)
    engine.add_request("n", LONG, dataclasses.replace(params, n=6, seed=0))
    outputs = run(engine)
    answers = [tuple(o.token_ids) for output in outputs.values() for o in output.outputs]
    assert len(set(answers)) == 12


def test_deltas_of_n_continuations_add_up(model):
    engine = make_engine(model, max_num_seqs=2)  # so that they take turns
    params = SamplingParams(n=3, seed=1, max_tokens=9, output_kind=RequestOutputKind.DELTA)
    engine.add_request("r", LONG, params)
    pieces, ends = {0: [], 1: [], 2: []}, []
    while engine.has_unfinished_requests():
        for output in engine.step():
            for c in output.outputs:
                pieces[c.index] += c.token_ids
                ends += [c.index] if c.finished else []
    assert list(pieces.values()) == alone(model, LONG, params)
    assert sorted(ends) == [0, 1, 2]


def test_best_of_returns_the_most_probable(model):
    params = SamplingParams(n=2, best_of=5, seed=3, max_tokens=7, ignore_eos=True)
    engine = make_engine(model, max_num_seqs=8)
    engine.add_request("r", LONG, params)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert len(outputs) == 1  # nothing before the end
    completions = outputs[0].outputs
    totals = []
    for ids in alone(model, LONG, params):
        logprobs = _all_logprobs(model, LONG + ids)
        totals.append((sum(logprobs[len(LONG) - 1 + i][t] for i, t in enumerate(ids)), ids))
    totals.sort(key=lambda t: -t[0])
    assert [list(c.token_ids) for c in completions] == [ids for _, ids in totals[:2]]
    want = [total for total, _ in totals[:2]]
    np.testing.assert_allclose([c.cumulative_logprob for c in completions], want, 1e-4)
    assert completions[0].logprobs is None  # not requested


def test_best_of_that_is_aborted_returns_the_longest(model):
    params = SamplingParams(n=2, best_of=4, seed=3, max_tokens=9, ignore_eos=True)
    engine = make_engine(model, max_num_seqs=2)
    engine.add_request("r", LONG, params)
    while sum(len(s.request.output_token_ids) for s in engine._streams.groups["r"].streams) < 20:
        engine.step()  # two are finished, two are not
    engine.abort_request("r")
    first, second = run(engine)["r"].outputs
    assert first.finish_reason == second.finish_reason == "length"
    engine.add_request("r", LONG, params)
    while not any(s.request.output_token_ids for s in engine._streams.groups["r"].streams):
        engine.step()  # some have not started
    engine.abort_request("r")
    first, second = run(engine)["r"].outputs
    assert first.finish_reason == second.finish_reason == "abort"
    assert len(first.token_ids) >= len(second.token_ids) and first.token_ids


# ---- log-probabilities


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 7}, {"max_prefill_chunk": 16}])
@pytest.mark.parametrize("count", [0, 3, -1])
def test_prompt_logprobs(model, options, count, late, monkeypatch):
    monkeypatch.setattr(prompt_logprobs, "_SLICE_LOGITS", 5 * VOCAB)  # 5 rows at once
    engine = make_engine(model, async_scheduling=late, **options)
    engine.add_request("warm", LONG, SamplingParams(max_tokens=1))  # a prefix to ignore
    run(engine)
    params = SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=count)
    engine.add_request("r", LONG, params)
    engine.add_request("beside", LONG[:20], SamplingParams(max_tokens=9))
    output = run(engine)["r"]
    assert output.num_cached_tokens == 0
    assert list(output.outputs[0].token_ids) == greedy_alone(model, LONG, 3)
    want = _all_logprobs(model, LONG)
    assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(LONG)
    for position, entry in enumerate(output.prompt_logprobs[1:], 1):
        row, token = want[position - 1], LONG[position]
        best = np.argsort(-row)[: VOCAB if count < 0 else count]
        assert set(entry) == {token, *best.tolist()}
        for i, logprob in entry.items():
            assert logprob.logprob == pytest.approx(row[i], abs=1e-4)
            assert logprob.rank == 1 + int((row > row[i]).sum())


def test_prompt_logprobs_of_n_and_of_one_token(model):
    params = SamplingParams(n=2, seed=1, max_tokens=2, prompt_logprobs=1)
    output = generate(model, LONG[:20], params)
    assert len(output.prompt_logprobs) == 20 and all(output.prompt_logprobs[1:])
    assert generate(model, [5], params).prompt_logprobs == [None]


def test_prompt_logprobs_survive_preemption(model):
    engine = make_engine(model, num_blocks=8, max_model_len=112, watermark=0.0)
    params = SamplingParams(temperature=0, max_tokens=36, ignore_eos=True, prompt_logprobs=0)
    for i in range(3):
        engine.add_request(str(i), LONG[i : i + 40], params)
    outputs = run(engine)
    assert engine.stats().num_preemptions > 0
    for i in range(3):
        prompt = LONG[i : i + 40]
        want = _all_logprobs(model, prompt)
        for position in range(1, 40):
            entry = outputs[str(i)].prompt_logprobs[position][prompt[position]]
            assert entry.logprob == pytest.approx(want[position - 1][prompt[position]], abs=1e-4)


def test_rank_of_a_token_outside_the_top(model):
    params = SamplingParams(max_tokens=12, seed=3, logprobs=1, ignore_eos=True)
    completion = generate(model, LONG, params).outputs[0]
    logprobs = _all_logprobs(model, LONG + list(completion.token_ids))
    for i, (token, entry) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
        row = logprobs[len(LONG) - 1 + i]
        assert entry[token].rank == 1 + int((row > row[token]).sum())


# ---- what may be sampled


def test_bias_mask_and_min_tokens(model, late):
    options = {"async_scheduling": late}

    def ids(prompt=LONG, **params):
        fields = {"temperature": 0.0, "max_tokens": 8} | params
        return list(
            generate(model, prompt, SamplingParams(**fields), **options).outputs[0].token_ids
        )

    assert ids(logit_bias={42: 100.0}) == [42] * 8
    assert ids(logit_bias={EOS: 100.0}) == [EOS]
    assert ids(logit_bias={EOS: 100.0}, ignore_eos=True) == [EOS] * 8
    assert set(ids(allowed_token_ids=[7, 9], temperature=1.0, seed=1)) <= {7, 9}
    held_off = ids(logit_bias={EOS: 100.0}, min_tokens=5)
    assert len(held_off) == 6 and held_off.index(EOS) == 5
    stop = ids(logit_bias={42: 100.0}, stop_token_ids=[42], min_tokens=3)
    assert len(stop) == 4 and stop.index(42) == 3


def test_penalties_count_the_output_only_once_each(model, late):
    bias = {42: 50.0, 43: 49.0}
    params = SamplingParams(
        temperature=0, max_tokens=6, ignore_eos=True, logit_bias=bias, presence_penalty=2.0
    )
    output = generate(model, LONG, params, async_scheduling=late)
    assert list(output.outputs[0].token_ids)[:2] == [42, 43]
    params = SamplingParams(
        temperature=0, max_tokens=4, ignore_eos=True, logit_bias={42: 9.0}, repetition_penalty=100.0
    )
    output = generate(model, [8, 9], params, async_scheduling=late)
    assert list(output.outputs[0].token_ids).count(42) == 1


def _with_tokenizer(model, tokenizer, monkeypatch):
    monkeypatch.setattr(type(model), "has_tokenizer", True)
    monkeypatch.setitem(model.__dict__, "tokenizer", tokenizer)
    return model


def _prefer(first, second, third):
    """Draw three tokens: the first of these ids that is not forbidden."""
    return SamplingParams(
        temperature=0,
        max_tokens=3,
        ignore_eos=True,
        allowed_token_ids=[first, second, third],
        logit_bias={first: 100.0, second: 99.0},
    )


@pytest.fixture
def worded(model, monkeypatch):
    """The model, with a tokenizer."""
    return _with_tokenizer(model, Words(), monkeypatch)


def test_bad_words(worded, late):
    free = greedy_alone(worded, LONG, 10, eos=False)
    text = f"w{free[3]} w{free[4]}"
    params = SamplingParams(
        temperature=0, max_tokens=10, ignore_eos=True, bad_words=[text, f"w{free[0]}"]
    )
    ids = list(generate(worded, LONG, params, async_scheduling=late).outputs[0].token_ids)
    assert free[0] not in ids and len(ids) == 10
    assert (free[3], free[4]) not in itertools.pairwise(ids)


@pytest.mark.parametrize(
    "metadata", [BYTE_LEVEL, *(one["metadata"] for one in GOLDEN["sentencepiece"])]
)
def test_bad_words_with_and_without_a_space(monkeypatch, metadata):
    """Tokenizers that begin a text with a space have the word without one behind other text."""
    tokenizer = load_tokenizer(metadata)
    config = dataclasses.replace(CONFIG, vocab_size=tokenizer.vocab_size)
    model = _with_tokenizer(tiny_model(config=config), tokenizer, monkeypatch)
    # Of ids of one text the last: the others are single bytes, which no text is encoded to.
    ids = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    bare, spaced, other = (ids[text] for text in (b"a", b" a", b"b"))
    params = _prefer(bare, spaced, other)
    for words, text in ([], "aaa"), (["a"], "bbb"):
        output = generate(model, [5], dataclasses.replace(params, bad_words=words))
        assert output.outputs[0].text == text


def test_bad_words_of_ids_that_the_model_lacks(worded):
    """A tokenizer may be larger than the model's vocabulary."""
    free = greedy_alone(worded, LONG, 4, eos=False)
    outside = worded.config.vocab_size
    words = [f"w{outside}", f"w{free[0]} w{outside}", f"w{free[1]} w{free[2]}"]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, bad_words=words)
    ids = list(generate(worded, LONG, params).outputs[0].token_ids)
    assert ids[:2] == free[:2] and ids[2] != free[2]


def test_a_bad_word_of_whitespace_forbids_no_other(monkeypatch):
    """Without line breaks there may be spaces."""
    tokenizer = load_tokenizer(BYTE_LEVEL)
    config = dataclasses.replace(CONFIG, vocab_size=tokenizer.vocab_size)
    model = _with_tokenizer(tiny_model(config=config), tokenizer, monkeypatch)
    line, space, other = (tokenizer.encode(text)[-1] for text in ("\n", " ", "b"))
    params = _prefer(line, space, other)
    for words, token in ([], line), (["\n"], space), ([" "], line):
        output = generate(model, [5], dataclasses.replace(params, bad_words=words))
        assert list(output.outputs[0].token_ids) == [token] * 3


def test_stop_strings(worded, late):
    free = greedy_alone(worded, LONG, 12, eos=False)
    stop = f"w{free[5]} w{free[6]}"
    for kind in RequestOutputKind:
        params = SamplingParams(
            temperature=0, max_tokens=12, ignore_eos=True, stop=stop, output_kind=kind
        )
        engine = make_engine(worded, async_scheduling=late)
        engine.add_request("r", LONG, params)
        outputs = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
        last = outputs[-1].outputs[0]
        pieces = [o.outputs[0].text for o in outputs]
        text = "".join(pieces) if kind is RequestOutputKind.DELTA else last.text
        assert text == "".join(f"w{i} " for i in free[:5])
        assert (last.finish_reason, last.stop_reason) == ("stop", stop)
        run(engine)


def test_text_decoded_at_the_end_equals_streamed_text(worded):
    def text(**params):
        fields = {"temperature": 0.0, "max_tokens": 20} | params
        return generate(worded, LONG, SamplingParams(**fields)).outputs[0].text

    free = greedy_alone(worded, LONG, 20)
    for extra in ({}, {"stop_token_ids": [free[4]]}, {"logit_bias": {EOS: 100.0}}):
        final = text(output_kind=RequestOutputKind.FINAL_ONLY, **extra)
        assert final == text(**extra)
    assert text(stop_token_ids=[free[4]]).split() == [f"w{i}" for i in free[:4]]


def test_logprobs_carry_text(worded):
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=2, prompt_logprobs=0)
    output = generate(worded, LONG, params)
    for entry in (*output.outputs[0].logprobs, *output.prompt_logprobs[1:]):
        assert all(p.decoded_token == f"w{i} " for i, p in entry.items())


# ---- logits processors


def test_logits_processors_see_the_output_and_change_the_logits(model, late):
    seen = []

    def count_up(output_ids, logits):
        seen.append(list(output_ids))
        logits[...] = -1e9
        logits[10 + len(output_ids)] = 0.0

    def shift(output_ids, logits):
        return model.device.xp.roll(logits, 1)

    params = SamplingParams(max_tokens=4, logits_processors=[count_up, shift])
    output = generate(model, LONG, params, async_scheduling=late)
    assert list(output.outputs[0].token_ids) == [11, 12, 13, 14]
    assert seen == [[], [11], [11, 12], [11, 12, 13]]


def _raises(output_ids, logits):
    raise ValueError("broken")


@pytest.mark.parametrize(
    ("processor", "why"),
    [
        (_raises, "a logits processor raised ValueError: broken"),
        (lambda ids, logits: 5, "returned int; wanted None or an array"),
        (lambda ids, logits: logits[:3], r"array of shape \(3,\)"),
        (lambda ids, logits: logits.astype(str) if hasattr(logits, "ctypes") else 1, "wanted"),
        (lambda ids, logits: logits * np.nan, "NaN"),
        (lambda ids, logits: logits - np.inf, "NaN, or leave no token"),
    ],
)
def test_a_bad_processor_fails_its_request_only(model, processor, why, late):
    engine = make_engine(model, async_scheduling=late)
    engine.add_request("bad", LONG, SamplingParams(max_tokens=9, logits_processors=[processor]))
    engine.add_request("good", [8, 9], SamplingParams(temperature=0, max_tokens=6))
    outputs = run(engine)
    bad = outputs["bad"].outputs[0]
    assert bad.finish_reason == "error"
    assert re.search(why, bad.stop_reason)
    assert list(outputs["good"].outputs[0].token_ids) == greedy_alone(model, [8, 9], 6)


@pytest.mark.parametrize("drafts", [None, {"method": "ngram", "num_speculative_tokens": 3}])
def test_options_that_forbid_every_token_are_told_from_bad_logits(model, drafts, late):
    engine = make_engine(model, async_scheduling=late, speculative_config=drafts)
    engine.add_request("good", [7, 8] * 20, SamplingParams(max_tokens=9, logit_bias={8: 100}))
    both = {"allowed_token_ids": [EOS], "min_tokens": 3, "max_tokens": 5}
    why = {"both": "conflicting options: allowed_token_ids and min_tokens leave no token"}
    engine.add_request("both", LONG, SamplingParams(**both))
    for name, value in (("nan", np.nan), ("inf", np.inf)):
        processor = lambda ids, logits, value=value: logits.__setitem__(7, value)  # noqa: E731
        engine.add_request(name, LONG, SamplingParams(**both, logits_processors=[processor]))
        why[name] = "its logits are NaN, or leave no token to choose"
    outputs = run(engine)
    assert outputs.pop("good").outputs[0].token_ids == [8] * 9
    assert {name: output.outputs[0].stop_reason for name, output in outputs.items()} == why


# ---- timeouts and aborts


def test_a_timeout_ends_a_request(model, late):
    engine = make_engine(model, async_scheduling=late)
    endless = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    engine.add_request("slow", LONG, endless, timeout=1)
    engine.add_request("waits", LONG, endless, timeout=1, priority=5)
    engine.add_request("fine", [8, 9], SamplingParams(temperature=0, max_tokens=6), timeout=1e4)
    first = engine.step()
    assert not any(o.finished for o in first)
    time.sleep(1.1)
    outputs = run(engine)
    for name in ("slow", "waits"):
        completion = outputs[name].outputs[0]
        assert (completion.finish_reason, completion.stop_reason) == ("abort", "timeout")
        want = greedy_alone(model, LONG, 9, eos=False)[: len(completion.token_ids)]
        assert list(completion.token_ids) == want
    assert outputs["fine"].outputs[0].finish_reason == "length"
    assert engine.stats().request_success == {"abort": 2, "length": 1}
    with pytest.raises(RequestError, match="timeout must be a number in"):
        engine.add_request("r", [5], timeout=0)


def test_timeouts_of_finished_requests_are_forgotten(model):
    engine = make_engine(model)
    for index in range(300):
        engine.add_request(str(index), [5], SamplingParams(max_tokens=1), timeout=1e6)
        engine.step()
    assert len(engine._streams._deadlines._heap) < 80


def _wanted_state(name):
    def reached(request):
        return {
            "waiting": request.status is RequestStatus.WAITING,
            "prefill": request.status is RequestStatus.RUNNING
            and 0 < request.num_computed_tokens < len(LONG),
            "decode": request.status is RequestStatus.RUNNING and request.num_output_tokens > 2,
            "pending": request.num_pending_tokens > 0,
            "preempted": request.status is RequestStatus.PREEMPTED,
            "swapped": request.status is RequestStatus.SWAPPED,
        }[name]

    return reached


@pytest.mark.parametrize(
    "state", ["waiting", "prefill", "decode", "pending", "preempted", "swapped"]
)
def test_abort_in_every_state(model, state):
    mode = "swap" if state == "swapped" else "recompute"
    engine = make_engine(
        model,
        num_blocks=9,
        max_model_len=140,
        watermark=0.0,
        async_scheduling=state == "pending",
        swap_space_gb=swap_gb(20),
        preemption_mode=mode,
    )
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    names = ["a", "b", "c"]
    for index, name in enumerate(names):
        engine.add_request(name, LONG[index : index + 60], params)
    reached, victim = _wanted_state(state), None
    while victim is None and engine.has_unfinished_requests():
        for request in engine.scheduler.unfinished_requests():
            if reached(request):
                victim = request.request_id
                break
        else:
            engine.step()
    assert victim is not None, f"no request was ever {state}"
    engine.abort_request([victim, victim, "unknown"])
    engine.abort_request(victim)
    engine.check_integrity()
    engine.add_request(victim, [8, 9], SamplingParams(temperature=0, max_tokens=5))  # id is free
    outputs = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        engine.check_integrity()
    ended = [o for o in outputs[victim] if o.outputs[0].finish_reason == "abort"]
    assert len(ended) == 1
    new = [o for o in outputs[victim] if list(o.prompt_token_ids) == [8, 9]]
    assert list(new[-1].outputs[0].token_ids) == greedy_alone(model, [8, 9], 5)
    for index, name in enumerate(names):
        if name != victim:
            want = greedy_alone(model, LONG[index : index + 60], 60, eos=False)
            assert list(outputs[name][-1].outputs[0].token_ids) == want
    assert run(engine) == {}


# ---- metrics


def test_metrics(model, late):
    engine = make_engine(model, async_scheduling=late)
    params = SamplingParams(max_tokens=5, ignore_eos=True, seed=1)
    engine.add_request("cold", LONG, params)
    cold = run(engine)["cold"].metrics
    engine.add_request("warm", LONG, SamplingParams(n=2, max_tokens=5, ignore_eos=True, seed=1))
    warm = run(engine)["warm"].metrics
    assert cold.num_cached_tokens == 0 and warm.num_cached_tokens == 64
    assert cold.num_generation_tokens == 5 and warm.num_generation_tokens == 10
    for m in (cold, warm):
        assert m.queue_time >= 0 and m.prefill_time > 0 and m.itl > 0
        assert m.e2e_time == pytest.approx(m.queue_time + m.prefill_time + m.decode_time)
        assert m.itl * 4 <= m.decode_time
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.generation_tokens) == (2 * len(LONG), 15)
    assert stats.request_success == {"length": 2}
    assert stats.prefix_cache_hits == 64
    assert stats.time_to_first_token_seconds.count == 2
    assert stats.e2e_request_latency_seconds.mean > 0
    assert stats.num_requests_running == stats.num_requests_waiting == 0
    assert stats.kv_cache_usage_perc == 0.0


@pytest.mark.parametrize("max_num_seqs", [2, 1])
def test_metrics_of_a_child(model, max_num_seqs):
    """It has begun when it shares its parent's blocks, or when it leaves the queue."""
    engine = make_engine(model, max_num_seqs=max_num_seqs)
    engine.add_request("p", LONG, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    for _ in range(4):
        engine.step()
    engine.add_request("c", [*LONG, 5], SamplingParams(max_tokens=2, ignore_eos=True), parent="p")
    m = run(engine)["c"].metrics
    assert m.queue_time >= 0 and m.prefill_time > 0
    assert m.e2e_time == pytest.approx(m.queue_time + m.prefill_time + m.decode_time)
    stats = engine.stats()
    assert stats.request_queue_time_seconds.count == stats.request_prefill_time_seconds.count == 2


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY])
def test_metrics_of_a_resumed_request_leave_out_the_other_engines_tokens(model, kind):
    engine = make_engine(model)
    params = SamplingParams(max_tokens=30, ignore_eos=True, seed=1, output_kind=kind)
    engine.add_request("r", LONG, params, resumed=[list(range(5, 30))])
    m = run(engine)["r"].metrics
    assert m.num_generation_tokens == engine.stats().generation_tokens == 5
    assert m.itl == pytest.approx((m.last_token_time - m.first_token_time) / 4)


def test_llm_takes_priorities_and_salts(model):
    llm = make_llm(model)
    prompts = [{"prompt_token_ids": LONG, "cache_salt": "a"}, LONG]
    params = SamplingParams(temperature=0, max_tokens=3)
    outputs = llm.generate(prompts, params, priority=[1, 0])
    assert [list(o.outputs[0].token_ids) for o in outputs] == [greedy_alone(model, LONG, 3)] * 2
    with pytest.raises(
        RequestError, match=r"priority must be one whole number, or one per prompt \(2\); got 3"
    ):
        llm.generate(prompts, params, priority=[1, 2, 3])
    assert llm.get_metrics().prompt_tokens == 2 * len(LONG)


def test_a_processor_may_refuse_what_only_a_wrong_draft_would_say(model):
    """An error behind a draft that is not accepted ends nothing."""
    tokens = greedy_alone(model, [5, 6, 7], 12, eos=False)
    seen = []

    def strict(ids, logits):
        seen.append(set(ids) - set(tokens))
        if seen[-1]:
            raise KeyError(f"never allowed: {seen[-1]}")

    params = SamplingParams(
        temperature=0.0, max_tokens=12, ignore_eos=True, logits_processors=[strict]
    )
    spare = next(token for token in range(4, VOCAB) if token not in tokens)
    config = {"proposer": lambda ids, count: [spare] * count, "num_speculative_tokens": 3}
    found = generate(model, [5, 6, 7], params, speculative_config=config | {"adaptive": False})
    assert found.outputs[0].finish_reason == "length"
    assert list(found.outputs[0].token_ids) == tokens and any(seen)


@pytest.mark.parametrize("parent", [None, "p"])
def test_the_prompt_of_a_child_is_scored(model, parent):
    prompt = list(range(5, 45))
    tokens = greedy_alone(model, prompt, 8, eos=False)
    engine = make_engine(model)
    engine.add_request("p", prompt, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    for _ in range(5):
        engine.step()
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, prompt_logprobs=0)
    engine.add_request("c", [*prompt, *tokens[:2], 50], params, parent=parent)
    entries = run(engine)["c"].prompt_logprobs
    assert entries[0] is None and None not in entries[1:]


def test_continuations_begin_though_the_first_was_swapped_out_with_its_prompt_in_flight():
    model = tiny_model()

    def served(num_known):
        options = {"num_blocks": 5, "max_model_len": 80, "watermark": 0.0}
        options |= {"max_num_batched_tokens": 64, "swap_space_gb": swap_gb(8)}
        engine = make_engine(model, async_scheduling=True, preemption_mode="swap", **options)
        plain = {"max_tokens": 40, "ignore_eos": True}
        engine.add_request("a", list(range(5, 36)), SamplingParams(temperature=0.0, **plain))
        engine.step()
        while engine.scheduler._queues.requests["a"].num_tokens < num_known:
            engine.step()
        params = SamplingParams(
            seed=1, n=2, output_kind=RequestOutputKind.DELTA, **plain | {"max_tokens": 14}
        )
        engine.add_request("b", list(range(40, 72)), params)
        first, last = {}, {}
        for step in itertools.count():
            if not engine.has_unfinished_requests():
                return first, last, engine.scheduler.stats().num_preemptions
            for output in engine.step():
                for each in output.outputs if output.request_id == "b" else ():
                    first.setdefault(each.index, step)
                    last[each.index] = step
            engine.check_integrity()

    results = [served(num_known) for num_known in (32, 33, 47, 48, 49)]
    assert any(num_preemptions for *_, num_preemptions in results)
    assert all(first[1] <= last[0] for first, last, _ in results)
