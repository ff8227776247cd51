"""Requests that another engine has begun: they go on with the tokens they would have got there."""

from __future__ import annotations

import dataclasses
import json

import pytest

from engine import LLMEngine, SamplingParams
from engine.errors import RequestError
from engine.llm_engine import QueueFullError
from engine.sampling_params import RequestOutputKind
from tests.e2e.tiny import Words, check_drained, make_engine, run, tiny_model

DELTA = RequestOutputKind.DELTA
PROMPT = [5, 6, 7, *range(8, 30)]

KINDS = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 3, "top_k": 20},
    {"temperature": 0.9, "seed": 4, "repetition_penalty": 1.4, "presence_penalty": 0.3},
    {"temperature": 0.9, "seed": 5, "frequency_penalty": 0.7, "min_tokens": 12},
    {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1},
    {"temperature": 1.0, "seed": 6, "logit_bias": {9: 4.0}, "allowed_token_ids": [*range(5, 60)]},
    {"temperature": 1.0, "seed": 7, "n": 3},
    {"temperature": 1.0, "seed": 8, "n": 2, "logprobs": 1},
]


def _model(where="cpu"):
    return tiny_model(where, deterministic=True)


def _params(**options):
    return SamplingParams(**({"max_tokens": 20, "ignore_eos": True} | options), output_kind=DELTA)


def _collect(engine, max_steps=500):
    """Step to the end; return each continuation's new ids, log-probabilities and end."""
    found = {}
    for _ in range(max_steps):
        if not engine.has_unfinished_requests():
            check_drained(engine)
            return found
        for output in engine.step():
            for each in output.outputs:
                ids, logprobs, _ = found.get(each.index, ([], [], None))
                ids, logprobs = [*ids, *each.token_ids], [*logprobs, *(each.logprobs or ())]
                found[each.index] = ids, logprobs, each.finish_reason
        engine.check_integrity()
    raise AssertionError("not drained")


CASES = [("cpu", known) for known in (0, 1, 7, 19)] + [
    pytest.param("cuda", known, marks=pytest.mark.gpu) for known in (0, 7)
]


@pytest.mark.parametrize(("where", "num_known"), CASES)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_rest_is_what_one_engine_would_have_said(kind, where, num_known):
    params = _params(**kind)
    engine = make_engine(_model(where))
    engine.add_request("r", PROMPT, params)
    whole = _collect(engine)
    other = make_engine(_model(where))
    other.add_request("r", PROMPT, params, resumed=[ids[:num_known] for ids, *_ in whole.values()])
    rest = _collect(other)
    for index, (ids, logprobs, reason) in whole.items():
        assert rest[index][0] == ids[num_known:] and rest[index][2] == reason == "length"
        if params.logprobs is not None:
            assert [{*e} for e in rest[index][1]] == [{*e} for e in logprobs[num_known:]]
            for new, old in zip(rest[index][1], logprobs[num_known:], strict=True):
                assert all(abs(new[i].logprob - old[i].logprob) < 1e-4 for i in new)


def test_continuations_that_have_ended_are_left_alone():
    params = _params(n=3, seed=9)
    engine = make_engine(_model())
    engine.add_request("r", PROMPT, params)
    whole = _collect(engine)
    engine.add_request("r", PROMPT, params, resumed=[None, whole[1][0][:5], None])
    rest = _collect(engine)
    assert set(rest) == {1} and rest[1][0] == whole[1][0][5:]


@pytest.mark.parametrize("extra", [{"n": 3}, {"n": 2, "best_of": 3}], ids=str)
@pytest.mark.parametrize("kind", [RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY])
def test_no_output_holds_continuations_that_have_ended(kind, extra):
    params = dataclasses.replace(_params(n=3, seed=9), output_kind=kind, **extra)
    engine = make_engine(_model())
    engine.add_request("r", PROMPT, params, resumed=[None, [5, 6], None])
    indices = set()
    while engine.has_unfinished_requests():
        for output in engine.step():
            [one] = output.outputs
            indices.add(one.index)
    assert indices == {0 if "best_of" in extra else 1}
    assert (one.finish_reason, one.token_ids[:2], len(one.token_ids)) == ("length", [5, 6], 20)


def test_bad_words_that_began_before_are_known(monkeypatch):
    monkeypatch.setattr("engine.model.Model.has_tokenizer", True)
    monkeypatch.setattr("engine.model.Model.tokenizer", Words())
    plain = _params(temperature=0.0, detokenize=False)
    engine = make_engine(_model())
    engine.add_request("r", PROMPT, plain)
    ids = _collect(engine)[0][0]
    params = dataclasses.replace(plain, bad_words=[f"w{ids[5]} w{ids[6]}"])
    engine.add_request("r", PROMPT, params)
    whole = _collect(engine)[0][0]
    assert whole[:6] == ids[:6] and whole[6] != ids[6]
    engine.add_request("r", PROMPT, params, resumed=[ids[:6]])
    assert _collect(engine)[0][0] == whole[6:]


def test_a_full_queue_takes_them():
    engine = make_engine(_model(), max_num_seqs=1, max_num_queued_requests=1)
    engine.add_request("a", PROMPT, _params(temperature=0.0))
    with pytest.raises(QueueFullError):
        engine.add_request("b", PROMPT, _params(temperature=0.0))
    engine.add_request("b", PROMPT, _params(n=2, seed=1), resumed=[[], [5]])
    assert len(run(engine)) == 2


def test_a_fork_counts_cached_tokens_of_its_prompt_alone():
    """It shares keys of its parent's output, too: those of tokens that it has generated before."""
    engine = make_engine(_model())
    engine.add_request("parent", PROMPT, _params(temperature=0.0))
    ids = [token for _ in range(12) for o in engine.step() for token in o.outputs[0].token_ids]
    assert len(ids) > 6
    child = _params(temperature=0.0)
    engine.add_request("child", PROMPT, child, parent="parent", resumed=[ids[:6]])
    output = run(engine)["child"]
    assert output.num_cached_tokens == output.metrics.num_cached_tokens == len(PROMPT)


def test_they_are_checked_like_others():
    engine = make_engine(_model())
    params = _params(n=2, seed=1)
    for resumed in ([], [[1]], [[1], [2], [3]], [None, None]):
        with pytest.raises(RequestError, match="resumed must have 2 continuations"):
            engine.add_request("r", PROMPT, params, resumed=resumed)
    with pytest.raises(RequestError, match="fewer tokens than max_tokens"):
        engine.add_request("r", PROMPT, params, resumed=[[5], [5] * 20])
    for wrong in (-1, 1 << 40):
        with pytest.raises(RequestError, match=rf"resumed\[1\]\[2\] must be a token id.*{wrong}"):
            engine.add_request("r", PROMPT, params, resumed=[[5], [5, 6, wrong]])
    for wrong, message in (
        (5, "resumed must be a sequence of continuations; got 5"),
        (iter([[5], [6]]), "resumed must be a sequence of continuations; got <list_iterator"),
        ([[5], 6], r"resumed\[1\] must be a sequence of token ids; got 6"),
        ([[5], iter([6])], r"resumed\[1\] must be a sequence of token ids; got <list_iterator"),
    ):
        with pytest.raises(RequestError, match=message):
            engine.add_request("r", PROMPT, params, resumed=wrong)
    check_drained(engine)


@pytest.mark.parametrize("kind", [{"temperature": 0.0}, {"temperature": 0.7, "seed": 3}], ids=str)
def test_drafts_are_proposed_after_what_came_before(kind):
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    config["adaptive"] = False
    prompt = [5, 6, 7, 8] * 8
    engine = make_engine(_model(), speculative_config=config)
    engine.add_request("r", prompt, _params(**kind))
    whole = _collect(engine)[0][0]
    engine.add_request("r", prompt, _params(**kind), resumed=[whole[:9]])
    assert _collect(engine)[0][0] == whole[9:]
    assert engine.stats().speculation.num_draft_tokens > 0


@pytest.mark.parametrize("extra", [{}, {"logprobs": 0}, {"stop": ["w0 w0 w0"]}], ids=str)
@pytest.mark.parametrize("kind", RequestOutputKind)
def test_text_goes_on_where_it_was(monkeypatch, kind, extra):
    model = _model()
    monkeypatch.setattr(type(model), "has_tokenizer", True)
    monkeypatch.setitem(model.__dict__, "tokenizer", Words())
    options = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, "output_kind": kind}

    def served(resumed=None):
        engine = make_engine(model)
        engine.add_request("r", PROMPT, SamplingParams(**options, **extra), resumed=resumed)
        text = ""
        while engine.has_unfinished_requests():
            for output in engine.step():
                new = output.outputs[0].text
                text = text + new if kind is DELTA else new
        return text

    whole = served()
    engine = make_engine(model)
    engine.add_request("r", PROMPT, _params(temperature=0.0, max_tokens=12))
    known = _collect(engine)[0][0][:5]
    rest = Words().decode(known)
    assert whole.startswith(rest)
    assert served([known]) == (whole[len(rest) :] if kind is DELTA else whole)


class Broken(Words):
    """A tokenizer that cannot decode one id."""

    def __init__(self, token_id):
        self.token_id = token_id

    def token_bytes(self, token_id):
        if token_id == self.token_id:
            raise ValueError("no text")
        return super().token_bytes(token_id)


@pytest.mark.parametrize("extra", [{}, {"logprobs": 0}, {"stop": ["w0 w0 w0"]}], ids=str)
@pytest.mark.parametrize("kind", RequestOutputKind)
def test_a_tokenizer_that_raises_ends_its_continuation(monkeypatch, kind, extra):
    """As in the engine that generated the tokens; the other continuation goes on."""
    plain = _params(seed=3, n=2)
    engine = make_engine(_model())
    engine.add_request("r", PROMPT, plain)
    known = [ids for ids, *_ in _collect(engine).values()]
    bad = next(token for token in known[1][:8] if token not in known[0])
    model = _model()
    monkeypatch.setattr(type(model), "has_tokenizer", True)
    monkeypatch.setitem(model.__dict__, "tokenizer", Broken(bad))
    params = dataclasses.replace(plain, output_kind=kind, **extra)

    def ends(resumed):
        engine = make_engine(model)
        engine.add_request("r", PROMPT, params, resumed=resumed)
        found = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                found |= {o.index: (o.finish_reason, o.stop_reason) for o in output.outputs}
            engine.check_integrity()
        check_drained(engine)
        return found

    want = {0: ("length", None), 1: ("error", "the tokenizer raised ValueError: no text")}
    assert ends(None) == ends([known[0][:9], known[1][:8]]) == want


def test_a_stop_string_that_ended_before_ends_it_at_once(monkeypatch):
    model = _model()
    monkeypatch.setattr(type(model), "has_tokenizer", True)
    monkeypatch.setitem(model.__dict__, "tokenizer", Words())
    engine = make_engine(model)
    params = SamplingParams(max_tokens=9, stop="w6 w7", logprobs=0)
    engine.add_request("r", PROMPT, params, resumed=[[5, 6, 7, 8]])
    [output] = engine.step()
    [found] = output.outputs
    assert (found.text, found.finish_reason, found.stop_reason) == ("w5 ", "stop", "w6 w7")
    assert list(found.token_ids) == [5, 6, 7] and found.logprobs == [{}] * 3
    assert not run(engine)


def test_log_probabilities_of_earlier_tokens_are_not_known():
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0)
    engine = make_engine(_model())
    engine.add_request("r", PROMPT, params)
    [whole] = run(engine)["r"].outputs
    engine.add_request("r", PROMPT, params, resumed=[whole.token_ids[:5]])
    [rest] = run(engine)["r"].outputs
    assert rest.token_ids == whole.token_ids and rest.logprobs[:5] == [{}] * 5
    new = [e[i].logprob for i, e in zip(rest.token_ids[5:], rest.logprobs[5:], strict=True)]
    assert rest.cumulative_logprob == pytest.approx(sum(new))


@pytest.mark.slow
def test_a_grammar_goes_on_where_it_was():
    pytest.importorskip("llguidance", reason="needs the extra grammar")
    schema = {"type": "array", "items": {"enum": [1, 22, 333]}, "minItems": 5, "maxItems": 9}
    params = SamplingParams(
        temperature=1.0, seed=3, max_tokens=60, structured={"json": schema}, output_kind=DELTA
    )
    options = {"device": "cpu", "max_num_seqs": 2, "num_blocks": 64, "deterministic": True}
    with LLMEngine.from_name("smollm2", **options) as engine:
        engine.add_request("r", "Numbers:", params)
        whole = _collect(engine)[0]
        text = engine.tokenizer.decode(whole[0])
        assert 5 <= len(json.loads(text)) <= 9 and whole[2] == "stop"
        for num_known in (1, len(whole[0]) // 2, len(whole[0]) - 1):
            engine.add_request("r", "Numbers:", params, resumed=[whole[0][:num_known]])
            rest = _collect(engine)[0]
            assert rest[0] == whole[0][num_known:] and rest[2] == "stop"
