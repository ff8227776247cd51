"""Forced tokens as drafts: the same output in fewer steps."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from engine import SamplingParams
from engine.drafts import Drafts
from engine.request import Request
from engine.speculative.forced import ForcedTokens
from tests.e2e.test_structured_output import PROMPT, SCHEMA, Letters
from tests.e2e.tiny import make_engine, run, swap_gb, tiny_model

TAGS = {"regex": "<name>[a-z]{2,4}</name><is_member>(true|false)</is_member>"}


@pytest.fixture(scope="module")
def model():
    model = tiny_model()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model), "has_tokenizer", True)
        patch.setitem(model.__dict__, "tokenizer", Letters())
        yield model


@pytest.fixture
def make(model):
    """Make engines with forced tokens as drafts, and without."""

    def make(is_forced, **options):
        config = {"method": "grammar", "num_speculative_tokens": 5, "adaptive": False}
        return make_engine(model, speculative_config=config if is_forced else None, **options)

    return make


def _generate(engine, num_requests, **params):
    for i in range(num_requests):
        options = {"max_tokens": 90, "temperature": 2.0, "seed": i} | params
        engine.add_request(f"r{i}", PROMPT[i:], SamplingParams(**options))
    num_steps, steps = [0], engine.step

    def step():
        num_steps[0] += 1
        return steps()

    engine.step = step
    last = run(engine)
    return {n: [o.token_ids for o in last[n].outputs] for n in last}, last, num_steps[0]


@pytest.mark.parametrize("late", [False, True], ids=["sync", "late"])
@pytest.mark.parametrize("structured", [TAGS, {"json": SCHEMA}], ids=["tags", "schema"])
def test_the_same_tokens_in_fewer_steps(make, structured, late):
    want, last, most = _generate(make(False, async_scheduling=late), 4, structured=structured)
    engine = make(True, async_scheduling=late)
    got, _, num_steps = _generate(engine, 4, structured=structured)
    assert got == want and num_steps < (0.5 if structured is TAGS else 0.95) * most
    assert all(output.outputs[0].finish_reason == "stop" for output in last.values())
    stats = engine.stats().speculation
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 10
    assert stats.num_proposer_failures == 0


def test_several_continuations_under_preemption(make):
    sizes = {"max_num_seqs": 6, "num_blocks": 17, "max_model_len": 176}
    options = {"structured": TAGS, "n": 3}
    want, *_ = _generate(make(False, max_num_seqs=9), 3, **options)
    for swap in ({}, {"swap_space_gb": swap_gb(9), "preemption_mode": "swap"}):
        engine = make(True, **sizes, **swap)
        got, last, _ = _generate(engine, 3, **options)
        stats = engine.scheduler.stats()
        assert got == want and (stats.num_swaps if swap else stats.num_preemptions)
        assert engine.stats().speculation.num_accepted_tokens > 20
        for output in last.values():
            assert all(re.fullmatch(TAGS["regex"], o.text) for o in output.outputs)


def test_requests_with_and_without_a_grammar(make):
    for structured in (None, TAGS):
        want, *_ = _generate(make(False), 2, structured=structured)
        assert _generate(make(True), 2, structured=structured)[0] == want


class _Other:
    """Proposes 9 for each, or what it is told to."""

    def __init__(self, answer=None):
        self.answer = answer
        self.asked, self.forgotten, self.is_closed = [], [], False

    def propose(self, wanted):
        self.asked.append([request.request_id for request, _ in wanted])
        if isinstance(self.answer, Exception):
            raise self.answer
        return [Drafts((9,))] * len(wanted) if self.answer is None else self.answer

    def forget(self, request):
        self.forgotten.append(request.request_id)

    def cost(self, num_sequences, num_tokens):
        return num_sequences + 0.25 * num_tokens

    def close(self):
        self.is_closed = True


class _State:
    """Forces these ids after the first output id."""

    def __init__(self, ids):
        self._ids = ids

    def follow(self, output_ids):
        self.num = len(output_ids)

    def forced_tokens(self, limit):
        return self._ids[:limit] if self.num == 1 else []


def _request(name, grammar):
    rules = SimpleNamespace(ignore_eos=False, stop_token_ids=None, min_tokens=0)
    request = Request(name, [5, 6], rules, spec=SimpleNamespace(grammar=grammar))
    request.output_token_ids.append(4)
    return request


def test_the_other_proposer_gets_the_other_requests():
    other = _Other()
    proposer = ForcedTokens(other)
    a, b, c = _request("a", _State([7, 8, 9])), _request("b", None), _request("c", _State([]))
    assert proposer.propose([(a, 2), (b, 1), (c, 3)]) == [Drafts((7, 8)), *[Drafts((9,))] * 2]
    assert proposer.propose([(a, 3)]) == [Drafts((7, 8, 9))]
    assert other.asked == [["b", "c"]]
    a.output_token_ids.append(1)
    assert proposer.propose([(a, 3)]) == [Drafts((9,))]
    proposer.forget(a)
    proposer.close()
    assert other.forgotten == ["a"] and other.is_closed and proposer.cost(2, 3) == 2.75
    assert ForcedTokens().cost(2, 3) == 0.0 and ForcedTokens().propose([(b, 1)]) == [None]


@pytest.mark.parametrize("answer", [ValueError("no"), [], [None] * 3])
def test_a_fault_of_the_other_proposer_is_of_its_requests(answer):
    proposer = ForcedTokens(_Other(answer))
    forced, fault = proposer.propose([(_request("a", _State([7])), 1), (_request("b", None), 1)])
    assert forced == Drafts((7,)) and isinstance(fault, Exception)
    proposer.forget(_request("a", None))
