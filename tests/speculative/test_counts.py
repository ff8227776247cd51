"""Counters of drafts, by distance from the last known token, on cases written down by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from engine import LLMEngine, SamplingParams
from engine.drafts import Drafts
from engine.models.mock_model import MockModel
from engine.speculative.costs import StepCosts
from engine.speculative.counts import DraftCounts, SpeculationStats

VOCAB = 64
PROMPT = [1, 2, 3]


class Model(MockModel):
    """Knows where the drafts of a tree would be."""

    def hidden_states(self, batch, kv_pages):
        """Return token id and position of the tokens whose logits are wanted."""
        rows = slice(None) if batch.logits_indices is None else batch.logits_indices
        return np.stack([batch.token_ids[rows], batch.rope_positions[rows]], axis=1)


class Script:
    """Proposes what `plan` says for a number of output tokens: offsets to the right tokens.

    A list is a chain, at index i the right token i plus the offset; a pair is a tree, of (depth,
    offset) pairs and parents.
    """

    def __init__(self, plan):
        self.plan = plan
        self.asked = []

    def propose(self, wanted):
        """Return what is planned."""
        return [self._of(request, count) for request, count in wanted]

    def _of(self, request, count):
        self.asked.append((request.request_id, request.num_output_tokens, count))
        known = request.token_ids(0, request.num_known_tokens)
        right = MockModel(VOCAB).continuation(known, 8)
        planned = self.plan.get(request.num_output_tokens)
        if planned is None:
            return None
        if isinstance(planned, list):
            ids = [(right[i] + add) % VOCAB for i, add in enumerate(planned)]
            return Drafts(tuple(ids[:count]))
        entries, parents = planned
        return Drafts(tuple((right[d] + add) % VOCAB for d, add in entries), tuple(parents))

    def forget(self, request):
        """Do nothing."""

    def cost(self, num_sequences, num_tokens):
        """Return 0.0."""
        return 0.0

    def close(self):
        """Do nothing."""


def serve(plan, *, trees=False, graphs=False, names=("r",), **params):
    """Serve PROMPT with scripted drafts; return the counters, the script, and all steps."""
    model = Model(VOCAB, 256)
    model.deterministic = not trees
    config = {"proposer": print, "num_speculative_tokens": 4, "adaptive": False}
    engine = LLMEngine(model, num_blocks=64, debug=True, speculative_config=config)
    if graphs:
        engine.runner.capture_graphs(256, 4)
        engine.speculation._controller._lens = [5]
    script = engine.speculation._proposer._proposer = Script(plan)
    steps, launch = [], engine.runner.launch
    engine.runner.launch = lambda output: (
        steps.append({s.request.request_id: s.drafts for s in output.sequences}) or launch(output)
    )
    params = {"temperature": 0, "max_tokens": 12} | params
    for name in names:
        own = {"use_speculation": False} if name == "off" else {}
        engine.add_request(name, PROMPT, SamplingParams(**params | own))
    last = {}
    while engine.has_unfinished_requests():
        last.update((output.request_id, output) for output in engine.step())
    for output in last.values():
        ids = list(output.outputs[0].token_ids)
        assert ids == MockModel(VOCAB).continuation(PROMPT, len(ids))
    return engine.stats().speculation, script, steps


# Which drafts there are after how many output tokens. The first token comes from the prompt.
PLANS = {
    "all right": ({1: [0, 0, 0, 0]}, (1, 4, 4, (1, 1, 1, 1), (1, 1, 1, 1))),
    "all wrong": ({1: [1, 0, 0, 0]}, (1, 4, 0, (0, 0, 0, 0), (1, 1, 1, 1))),
    "two right": ({1: [0, 0, 1, 0]}, (1, 4, 2, (1, 1, 0, 0), (1, 1, 1, 1))),
    "short": ({1: [0]}, (1, 1, 1, (1, 0, 0, 0), (1, 0, 0, 0))),
    "several": (
        {1: [0, 0, 1], 4: [1], 5: [0, 0, 0, 0]}, (3, 8, 6, (2, 2, 1, 1), (3, 2, 2, 1)),
    ),
    "never reached": ({1: [0, 0, 0, 0], 3: [0]}, (1, 4, 4, (1, 1, 1, 1), (1, 1, 1, 1))),
    "before the end": ({9: [0, 0, 0, 0]}, (1, 2, 2, (1, 1, 0, 0), (1, 1, 0, 0))),
    "none": ({}, (0, 0, 0, (0, 0, 0, 0), (0, 0, 0, 0))),
}  # fmt: skip
TREES = {
    "second branch": (
        {1: ([(0, 1), (0, 0), (1, 0), (1, 1)], [-1, -1, 1, 1])},
        (1, 4, 2, (1, 1, 0, 0), (2, 2, 0, 0)),
    ),
    "wrong branches": (
        {1: ([(0, 1), (0, 2), (1, 0), (2, 0)], [-1, -1, 1, 2])},
        (1, 4, 0, (0, 0, 0, 0), (2, 1, 1, 0)),
    ),
}


def _stats(expected):
    drafts, drafted, accepted, accepted_by, drafted_by = expected
    return SpeculationStats(drafts, drafted, accepted, accepted_by, drafted_by, 0)


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("name", PLANS)
def test_chains(name, graphs):
    """Drafts that only pad to the length of a graph do not count, also beyond a request's end."""
    plan, expected = PLANS[name]
    stats, *_ = serve(plan, graphs=graphs)
    assert stats == _stats(expected)


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("name", TREES)
def test_trees(name, graphs):
    plan, expected = TREES[name]
    stats, *_ = serve(plan, trees=True, graphs=graphs)
    assert stats == _stats(expected)


def test_padding_that_is_accepted_does_not_count():
    """A tree of two branches; the sampled tokens follow the one that ends earlier, and padding."""
    engine = LLMEngine(
        MockModel(VOCAB, 64),
        num_blocks=8,
        speculative_config={"proposer": print, "num_speculative_tokens": 4},
    )
    request = object()
    drafts = Drafts((9, 8, 5, 5), (-1, 0, -1, 2))  # the last one pads
    sequence = SimpleNamespace(request=request, drafts=drafts)
    engine.speculation._num_real = {request: 3}
    step = SimpleNamespace(num_draft_tokens=4, sequences=[sequence])
    engine.speculation.record(step, {request: [5, 5, 7]})
    engine.speculation.learn()
    stats = engine.stats().speculation
    assert stats.num_accepted_tokens_per_pos == (1, 0, 0, 0)
    assert stats.num_draft_tokens_per_pos == (2, 1, 0, 0)


def test_drafts_after_the_end_of_the_text_count():
    """They were verified, and accepted; the tokens after a stop id are dropped later."""
    right = MockModel(VOCAB).continuation(PROMPT, 8)
    assert right[2] not in right[:2]
    stats, *_ = serve({1: [0, 0, 0, 0]}, stop_token_ids=[right[2]])
    assert stats == _stats((1, 4, 4, (1, 1, 1, 1), (1, 1, 1, 1)))


def test_a_request_that_switches_it_off_gets_no_drafts():
    stats, script, steps = serve({1: [0, 0, 0, 0]}, names=["off"])
    assert not script.asked and stats == _stats((0, 0, 0, (0,) * 4, (0,) * 4))
    assert len(steps) == 12 and not any(drafts for step in steps for drafts in step.values())

    stats, script, steps = serve({1: [0, 0, 0, 0]}, names=["r", "off"])
    assert {name for name, *_ in script.asked} == {"r"}
    assert not any(step.get("off") for step in steps)
    assert stats == _stats((1, 4, 4, (1, 1, 1, 1), (1, 1, 1, 1)))


def test_a_proposal_that_is_dropped_is_a_failure_only():
    stats, *_ = serve({1: [0, 0], 2: ([(0, 0)], [5])})
    assert stats.num_draft_tokens == 2 and stats.num_proposer_failures == 0
    stats, *_ = serve({1: ([(0, 0)], [5])})
    assert stats.num_draft_tokens == 0 and stats.num_proposer_failures == 1


def test_counters_add_up():
    counts = DraftCounts(3)
    counts.add([1, 1, 1], 2)
    counts.add([2, 1], 0)
    counts.add([1], 1)
    stats = counts.snapshot(4)
    assert stats == SpeculationStats(3, 7, 3, (2, 1, 0), (4, 2, 1), 4)
    assert stats.acceptance_rate == 3 / 7
    assert SpeculationStats().acceptance_rate == 0.0


def test_nothing_counts_while_drafts_do_not_pay():
    """The controller declines them before they are verified."""
    engine = LLMEngine(
        MockModel(VOCAB, 64),
        num_blocks=8,
        speculative_config={"proposer": print, "num_speculative_tokens": 4},
    )
    script = engine.speculation._proposer._proposer = Script(
        {count: [0, 0, 0, 0] for count in range(20)}
    )
    engine.speculation._controller._costs = StepCosts([1], [1, 2], [[1.0, 3.0]])
    engine.add_request("r", PROMPT, SamplingParams(temperature=0, max_tokens=12))
    while engine.has_unfinished_requests():
        engine.step()
    stats = engine.stats().speculation
    assert script.asked and (stats.num_drafts, stats.num_draft_tokens) == (0, 0)
