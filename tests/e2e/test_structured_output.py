"""Requests whose text must match a schema, an expression, a choice or a grammar."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
import string
import sys
import threading

import numpy as np
import pytest

from engine import LLMEngine, SamplingParams
from engine.async_engine import AsyncEngine
from engine.drafts import Drafts
from engine.errors import RequestError
from engine.sampling_params import RequestOutputKind
from engine.structured import grammar as grammar_module
from engine.structured import sources
from tests.e2e.tiny import EOS, VOCAB, make_engine, run, swap_gb, tiny_model

FIRST = 4  # id of the first letter
LETTERS = [c for c in map(chr, range(32, 127)) if c not in "`~"]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PROMPT = [int(i) for i in np.random.default_rng(7).integers(FIRST, VOCAB, 75)]


class Letters:
    """A tokenizer with one printable character per id."""

    special_ids = frozenset({EOS})
    strip_left = 0
    max_token_chars = 1
    bos_token_id = None
    eos_token_ids = (EOS,)

    def encode(self, text, add_special_tokens=True):
        return [FIRST + LETTERS.index(c) for c in text]

    def decode(self, ids, skip_special_tokens=True):
        return b"".join(map(self.token_bytes, ids)).decode()

    def token_bytes(self, token_id):
        return LETTERS[token_id - FIRST].encode() if FIRST <= token_id < VOCAB else b""


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def model(request):
    # On a GPU, only this mode gives the same tokens in any batch.
    model = tiny_model(request.param, deterministic=request.param == "cuda")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model), "has_tokenizer", True)
        patch.setitem(model.__dict__, "tokenizer", Letters())
        yield model


@pytest.fixture(params=[False, True], ids=["sync", "late"])
def late(request):
    return request.param


def _params(structured=None, **more):
    """Return parameters with which the random model ends soon."""
    options = {"max_tokens": 120, "structured": structured, "temperature": 2.0, "seed": 1}
    return SamplingParams(**options | more)


def _generate(model, params, **options):
    engine = make_engine(model, **options)
    engine.add_request("r", PROMPT, params)
    return run(engine)["r"].outputs


def _is_person(text):
    value = json.loads(text)
    return (
        list(value) == ["name", "age", "tags"]
        and isinstance(value["name"], str)
        and len(value["name"]) <= 6
        and type(value["age"]) is int
        and 0 <= value["age"] <= 120
        and set(value["tags"]) <= {"a", "b"}
        and len(value["tags"]) <= 2
    )


KINDS = {
    "json": ({"json": SCHEMA}, _is_person),
    "text": ({"json": json.dumps(SCHEMA)}, _is_person),
    "regex": ({"regex": "[0-9]{3}-[a-f]{4}"}, re.compile("[0-9]{3}-[a-f]{4}").fullmatch),
    "choice": ({"choice": ["yes", 'a "no"', "\\"]}, {"yes", 'a "no"', "\\"}.__contains__),
    "grammar": (
        {"grammar": 'start: "(" start ")" | LETTER\nLETTER: /[a-z]/'},
        lambda text: re.fullmatch(r"\(*[a-z]\)*", text) and text.count("(") == text.count(")"),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_matches(model, late, kind):
    structured, matches = KINDS[kind]
    for seed in range(6):
        params = _params(structured, seed=seed)
        (output,) = _generate(model, params, async_scheduling=late)
        assert output.finish_reason == "stop" and output.token_ids[-1] == EOS
        assert matches(output.text), output.text


def test_any_json_object(model):
    params = _params({"json_object": True}, max_tokens=200, logit_bias={FIRST + 93 - 2: 3.0})
    texts = [_generate(model, params)[0].text for _ in range(1)]
    assert all(text.startswith("{") for text in texts)


def test_the_schema_true_allows_any_json(model):
    (output,) = _generate(model, _params({"json": "true"}, max_tokens=1))
    assert re.fullmatch('[-0-9"{tfn]|\\[', output.text)


def test_continuations_match_each_by_itself(model, late):
    engine = make_engine(model, max_num_seqs=3, async_scheduling=late)
    engine.add_request("r", PROMPT, _params({"json": SCHEMA}, n=5))
    texts = [output.text for output in run(engine)["r"].outputs]
    assert len(set(texts)) == 5 and all(map(_is_person, texts))


@pytest.mark.parametrize(
    "more",
    [
        {"ignore_eos": True},
        {"min_tokens": 60},
        {"ignore_eos": True, "min_tokens": 60},
        {"min_tokens": 60, "stop_token_ids": [EOS]},
    ],
)
def test_a_complete_text_ends_whatever_else_is_asked_for(model, late, more):
    params = _params({"regex": "[a-z]{5}"}, **more)
    (output,) = _generate(model, params, async_scheduling=late)
    assert re.fullmatch("[a-z]{5}", output.text) and output.finish_reason == "stop"
    assert output.token_ids[-1] == EOS


def test_the_end_waits_while_the_text_can_go_on(model, late):
    """The expression allows the end after each letter."""
    pattern = {"regex": "[a-z]{0,30}"}
    bias = {EOS: 20.0}
    (short,) = _generate(model, _params(pattern, logit_bias=bias), async_scheduling=late)
    (long,) = _generate(
        model, _params(pattern, logit_bias=bias, min_tokens=9), async_scheduling=late
    )
    (all_of,) = _generate(
        model, _params(pattern, logit_bias=bias, ignore_eos=True), async_scheduling=late
    )
    assert len(short.text) < 3 and 8 <= len(long.text) < 12 and len(all_of.text) == 30
    assert {o.finish_reason for o in (short, long, all_of)} == {"stop"}


def test_the_end_does_not_wait_for_tokens_that_are_not_allowed(model, late):
    allowed = [EOS, FIRST + LETTERS.index("a")]
    params = _params({"regex": "ab*"}, allowed_token_ids=allowed, min_tokens=5, ignore_eos=True)
    [output] = _generate(model, params, async_scheduling=late)
    assert (output.text, output.finish_reason) == ("a", "stop")


def test_stop_strings_and_lengths_end_it_too(model):
    pattern = {"regex": "[a-z]{20}x[a-z]{20}"}
    (output,) = _generate(model, _params(pattern, stop="x"))
    assert output.finish_reason == "stop" and output.stop_reason == "x"
    (output,) = _generate(model, _params(pattern, max_tokens=7))
    assert output.finish_reason == "length" and re.fullmatch("[a-z]{7}", output.text)


def test_other_ways_of_sampling_apply_within_the_mask(model):
    digits = {"regex": "[0-9]{12}"}
    odd = [FIRST + LETTERS.index(c) for c in "13579"]
    params = _params(digits, allowed_token_ids=[*odd, EOS], repetition_penalty=1.2)
    assert re.fullmatch("[13579]{12}", _generate(model, params)[0].text)
    (greedy,) = _generate(model, _params(digits, temperature=0.0, seed=None, logprobs=VOCAB - 80))
    for token_id, entry in zip(greedy.token_ids, greedy.logprobs, strict=True):
        assert token_id in entry
    probable = [max(entry.values(), key=lambda e: e.logprob).rank for entry in greedy.logprobs]
    assert set(probable) == {1}  # log-probabilities are the model's, before the mask
    assert any(
        entry[i].rank > 1 for i, entry in zip(greedy.token_ids, greedy.logprobs, strict=True)
    )


def test_a_mask_that_leaves_no_token_fails_its_request_only(model, late):
    engine = make_engine(model, async_scheduling=late)
    engine.add_request("bad", PROMPT, _params({"regex": "[a-z]{9}"}, allowed_token_ids=[EOS]))
    engine.add_request("good", PROMPT, _params({"regex": "[a-z]{9}"}))
    last = run(engine)
    assert last["bad"].outputs[0].finish_reason == "error"
    assert re.fullmatch("[a-z]{9}", last["good"].outputs[0].text)


def test_a_limit_met_on_the_way_fails_its_request_only(model, late, monkeypatch):
    monkeypatch.setitem(sources._LIMITS, "max_lexer_states", 40)
    engine = make_engine(model, async_scheduling=late)
    engine.add_request("bad", PROMPT, _params({"regex": "[a-z]{100}"}))
    engine.add_request("good", PROMPT, _params({"choice": ["ab", "cd"]}))
    last = run(engine)
    assert last["bad"].outputs[0].finish_reason == "error"
    assert "too many states" in last["bad"].outputs[0].stop_reason
    assert last["good"].outputs[0].text in ("ab", "cd")


# ---- with other requests


def _random_params(rng):
    kinds = [structured for structured, _ in KINDS.values()]
    structured = rng.choice([*kinds, None, None])
    extras = [
        {},
        {},
        {"top_k": 20},
        {"logprobs": 2},
        {"repetition_penalty": 1.2},
        {"min_tokens": 5},
    ]
    more = rng.choice(extras) | {"seed": rng.randrange(2**40), "max_tokens": rng.randint(8, 60)}
    return _params(structured, **more)


def _one_by_one(model, requests):
    want = {}
    for name, (prompt, params) in requests.items():
        options = {"max_num_seqs": 1, "max_num_batched_tokens": 256, "cuda_graphs": False}
        engine = make_engine(model, async_scheduling=False, enable_prefix_caching=False, **options)
        engine.add_request(name, prompt, params)
        want[name] = list(run(engine)[name].outputs[0].token_ids)
    return want


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 5])
def test_preemption_and_batching_do_not_change_the_tokens(model, late, seed):
    rng = random.Random(seed)
    stem = [rng.randrange(FIRST, VOCAB) for _ in range(40)]
    requests = {
        f"r{i}": (
            stem[: rng.randint(1, 40)] + [rng.randrange(FIRST, VOCAB)] * rng.randint(30, 60),
            _random_params(rng),
        )
        for i in range(10)
    }
    engine = make_engine(
        model,
        max_num_seqs=6,
        num_blocks=11,
        max_model_len=176,
        max_prefill_chunk=rng.choice([0, 17]),
        async_scheduling=late,
        **{"swap_space_gb": swap_gb(9), "preemption_mode": "swap"} if seed % 2 else {},
    )
    for name, (prompt, params) in requests.items():
        engine.add_request(name, prompt, params)
    last = run(engine)
    got = {name: list(last[name].outputs[0].token_ids) for name in requests}
    assert got == _one_by_one(model, requests)
    stats = engine.scheduler.stats()
    assert stats.num_swaps if seed % 2 else stats.num_preemptions


def test_a_failed_step_is_repeated_from_the_same_state(model, late, monkeypatch):
    requests = {f"r{i}": (PROMPT[i:], _params({"json": SCHEMA}, seed=i)) for i in range(3)}
    want = _one_by_one(model, requests)
    engine = make_engine(model, async_scheduling=late)
    sampler, calls = engine.runner.sampler, [0]

    def broken(*args):
        calls[0] += 1
        if calls[0] in (4, 11, 12):
            raise MemoryError("injected")
        return sampler(*args)

    monkeypatch.setattr(engine.runner, "sampler", broken)
    for name, (prompt, params) in requests.items():
        engine.add_request(name, prompt, params)
    last = run(engine, num_failures=3)
    assert {name: list(last[name].outputs[0].token_ids) for name in requests} == want


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_drafts_do_not_change_the_tokens(model, late, tree):
    """Known tokens, often with a wrong one, which the grammar may not even allow."""
    requests = {f"r{i}": (PROMPT[i:], _params({"json": SCHEMA}, seed=i)) for i in range(3)}
    want = _one_by_one(model, requests)
    engine = make_engine(model, max_draft_tokens=6, num_blocks=96, async_scheduling=late)
    for name, (prompt, params) in requests.items():
        engine.add_request(name, prompt, params)
    rng, last, num_steps = random.Random(0), {}, 0
    while engine.has_unfinished_requests():
        for request in list(engine.scheduler.unfinished_requests()):
            start = request.num_tokens - request.num_prompt_tokens
            ids = want[request.request_id][start : start + 4]
            if ids and rng.random() < 0.4:
                ids[-1] = rng.randrange(VOCAB)
            parents = None
            if tree and len(ids) > 1:
                other = (ids[0] + 1) % VOCAB
                ids, parents = [ids[0], other, *ids[1:]], [-1, -1, 0, *range(2, len(ids))]
                assert Drafts(tuple(ids), tuple(parents)).is_tree
            engine.scheduler.propose(request, ids, parents)
        last.update((output.request_id, output) for output in engine.step())
        num_steps += 1
    assert {name: list(last[name].outputs[0].token_ids) for name in requests} == want
    assert tree or num_steps < max(map(len, want.values()))


def test_drafts_after_the_end_of_a_request_do_not_change_the_others(model):
    requests = {f"r{i}": (PROMPT[i:], _params({"json": SCHEMA}, seed=i)) for i in range(3)}
    want = _one_by_one(model, requests)
    short = _params({"choice": ["ab", "cd"]})
    for name in requests:  # in each row of the engine
        sizes = {"max_num_seqs": 3, "max_num_batched_tokens": 256, "num_blocks": 96}
        engine = make_engine(model, max_draft_tokens=2, async_scheduling=True, **sizes)
        for other, (prompt, params) in requests.items():
            engine.add_request(other, prompt, short if other == name else params)
        last, num_noted = {}, 0
        while engine.has_unfinished_requests():
            for request in list(engine.scheduler.unfinished_requests()):
                is_ending = request.num_tokens - request.num_prompt_tokens == 3  # the end is late
                if request.request_id == name and is_ending:
                    num_noted += engine.scheduler.propose(request, [FIRST, FIRST])
            last.update((output.request_id, output) for output in engine.step())
        assert num_noted and last[name].outputs[0].text in ("ab", "cd")
        assert not engine.stats().num_step_failures
        got = {other: list(last[other].outputs[0].token_ids) for other in want if other != name}
        assert got == {other: want[other] for other in got}


def test_decode_steps_replay_graphs_up_to_the_logits(model, late, monkeypatch):
    engine = make_engine(model, async_scheduling=late)
    if engine.runner.graphs is None:  # on the CPU, the steps that would be captured
        engine.runner.capture_graphs(engine.config.scheduler.max_model_len)
    logits, counts = engine.runner.graphs.logits, [0]

    def counted(inputs):
        result = logits(inputs)
        counts[0] += result is not None
        return result

    monkeypatch.setattr(engine.runner.graphs, "logits", counted)
    requests = {f"r{i}": (PROMPT[i:], _params({"json": SCHEMA}, seed=i)) for i in range(3)}
    for name, (prompt, params) in requests.items():
        engine.add_request(name, prompt, params)
    last = run(engine)
    assert counts[0] > 20
    got = {name: list(last[name].outputs[0].token_ids) for name in requests}
    assert got == _one_by_one(model, requests)


def test_a_step_is_launched_before_the_last_one_is_read(model, monkeypatch):
    """Only its sampling waits for the ids of the last one."""
    engine = make_engine(model, async_scheduling=True)
    engine.add_request("r", PROMPT[:9], _params({"json": SCHEMA}))
    calls = []
    for name in ("launch", "read", "sample"):
        method = getattr(engine.runner, name)

        def noted(step, *args, name=name, method=method):
            calls.append((name, getattr(step, "output", step).step_id))
            return method(step, *args)

        monkeypatch.setattr(engine.runner, name, noted)
    for _ in range(4):
        engine.step()
    at = {call: calls.index(call) for call in calls}
    assert at["launch", 2] < at["read", 1] < at["sample", 2] < at["launch", 3]


# ---- what is refused


def _refused(engine, structured):
    with pytest.raises(RequestError) as error:
        engine.add_request("r", PROMPT, _params(structured))
    assert not engine.has_unfinished_requests()
    return str(error.value)


@pytest.mark.parametrize(
    ("structured", "reason"),
    [
        ({"json": {"type": "thing"}}, "json cannot be compiled: type must be one or more of"),
        ({"json": {"uniqueItems": True}}, "uniqueItems cannot be enforced (at #)"),
        ({"json": {"$ref": "#"}}, "refers to itself without an object or array between"),
        ({"json": "false"}, "json cannot be compiled"),
        ({"regex": "(?=a)b"}, "look-ahead"),
        ({"regex": "("}, "unclosed group"),
        ({"grammar": "start: missing"}, "unknown name"),
        ({"grammar": "start: start"}, "no text matches it"),
    ],
)
def test_what_cannot_be_compiled_is_refused(model, structured, reason):
    engine = make_engine(model)
    assert reason in _refused(engine, structured)
    engine.add_request("r", PROMPT, _params({"choice": ["a"]}))
    assert run(engine)["r"].outputs[0].text == "a"


def test_hostile_schemas_are_refused_in_bounded_time(model):
    patterns = [{"type": "string", "pattern": f"(a|b)*a(a|b){{{i}}}"} for i in range(1, 15)]
    names = ["".join(letters) for letters in itertools.product(string.ascii_lowercase, repeat=3)]
    chain = "".join(f"{name}:{then}\n" for name, then in itertools.pairwise(names[:7900]))
    engine = make_engine(model)
    assert "takes more than 2 s" in _refused(engine, {"json": {"allOf": patterns}})
    assert "takes more than" in _refused(
        engine, {"json": {"type": "integer", "multipleOf": 999983}}
    )
    deep = {"grammar": f'start: aaa\n{chain}{names[7899]}: "a"\n'}
    assert "nests too deeply" in _refused(engine, deep)
    engine.add_request("r", PROMPT, _params({"choice": ["a"]}))
    assert run(engine)["r"].outputs[0].text == "a"


def test_equal_ones_are_compiled_once(model, monkeypatch):
    checked, check = [], grammar_module.check
    monkeypatch.setattr(grammar_module, "check", lambda *args: checked.append(args) or check(*args))
    engine = make_engine(model)
    for index in range(3):
        engine.add_request(f"r{index}", PROMPT, _params({"json": SCHEMA}, seed=index))
    assert len(checked) == 1
    assert all(_is_person(output.outputs[0].text) for output in run(engine).values())


def test_without_llguidance_the_error_names_the_extra(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    assert "pip install 'rawengine[grammar]'" in _refused(make_engine(model), {"choice": ["a"]})


def test_a_model_without_a_tokenizer_has_none(monkeypatch):
    model = tiny_model()
    monkeypatch.setattr(type(model), "has_tokenizer", False)
    engine = make_engine(model)
    assert "structured needs a model with a tokenizer" in _refused(engine, {"choice": ["a"]})


def test_it_can_be_compiled_before_it_is_added(model, monkeypatch):
    """In any thread, so that an engine that serves others does not wait for it."""
    engine = make_engine(model)
    params = _params({"json": SCHEMA})
    engine.prepare(params)
    engine.prepare(_params())
    with pytest.raises(RequestError, match="type must be one or more of"):
        engine.prepare(_params({"json": {"type": "thing"}}))
    monkeypatch.setattr(grammar_module, "check", None)  # nothing is compiled from here on
    engine.add_request("r", PROMPT, params)
    assert _is_person(run(engine)["r"].outputs[0].text)


def test_async_engine_compiles_outside_of_its_thread(model, monkeypatch):
    threads, prepare = [], LLMEngine.prepare

    def noted(self, params):
        threads.append(threading.current_thread())
        prepare(self, params)

    monkeypatch.setattr(LLMEngine, "prepare", noted)

    async def serve():
        engine = AsyncEngine(make_engine(model))
        try:
            params = _params({"json": SCHEMA}, output_kind=RequestOutputKind.FINAL_ONLY)
            outputs = [output async for output in engine.generate(PROMPT, params)]
            with pytest.raises(RequestError, match="type must be one or more of"):
                async for _ in engine.generate(PROMPT, _params({"json": {"type": "thing"}})):
                    pass
            return outputs
        finally:
            await engine.close()

    (output,) = asyncio.run(serve())
    assert _is_person(output.outputs[0].text)
    assert len(threads) == 2 and not any("engine" in thread.name for thread in threads)
