"""Forced tokens as drafts: the same output in fewer steps."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from engine import SamplingParams
from engine.drafts import Drafts
from engine.request import Request
from engine.speculative.costs import StepCosts
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


def test_only_a_grammar_without_a_choice_forces():
    a, b, c = _request("a", _State([7, 8, 9])), _request("b", None), _request("c", _State([]))
    proposer = ForcedTokens()
    assert proposer.propose([(a, 2), (b, 1), (c, 3)]) == [Drafts((7, 8)), None, None]
    assert proposer.propose([(a, 3)]) == [Drafts((7, 8, 9))] and proposer.cost(2, 3) == 0.0
    a.output_token_ids.append(1)
    assert proposer.propose([(a, 3)]) == [None]


@pytest.mark.parametrize("fails", [False, True])
def test_other_requests_and_places_are_the_proposers(model, fails):
    """And its faults are theirs."""
    asked = []

    def propose(token_ids, num_tokens):
        asked.append(len(token_ids))
        if fails:
            raise ValueError("no")

    config = {"proposer": propose, "num_speculative_tokens": 5, "adaptive": False}
    engine = make_engine(model, speculative_config=config)
    _generate(engine, 2, structured=TAGS)
    assert asked and engine.stats().speculation.num_accepted_tokens > 10
    num_asked = len(asked)
    assert (engine.stats().speculation.num_proposer_failures > 0) == fails
    engine = make_engine(model, speculative_config=config)
    _generate(engine, 2)
    assert (len(asked) > num_asked) and not engine.stats().speculation.num_draft_tokens


def test_forced_tokens_come_where_the_proposer_does_not_pay(model):
    engine = make_engine(model, speculative_config={"proposer": print, "num_speculative_tokens": 5})
    engine.speculation._proposer.cost = lambda num_sequences, num_tokens: 1e6
    engine.speculation._controller._costs = StepCosts([1], [1, 2], [[1.0, 1.01]])
    _generate(engine, 2, structured=TAGS)
    stats = engine.stats().speculation
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 10
    # What is forced says nothing about the proposer.
    assert not engine.speculation._controller._of_all.accepted
