"""Speculation in the engine: when it proposes, pads and rests, and what a faulty proposer does."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from engine import SamplingParams
from engine.drafts import Drafts
from engine.llm_engine import LLMEngine
from engine.models.mock_model import MockModel
from engine.speculative.costs import StepCosts

VOCAB = 64


class Proposer:
    """Knows the mock model's next tokens, and what it was asked for."""

    def __init__(self, cost=0.0):
        self.asked = []
        self.forgotten = []
        self.seconds = cost
        self.is_closed = False

    def propose(self, wanted):
        self.asked.append([(r.request_id, count, r.num_pending_tokens) for r, count in wanted])
        return [self.drafts(request, count) for request, count in wanted]

    def drafts(self, request, count):
        ids = request.token_ids(0, request.num_known_tokens)
        return Drafts(tuple(MockModel(VOCAB).continuation(ids, count)))

    def forget(self, request):
        self.forgotten.append(request.request_id)

    def cost(self, num_sequences, num_tokens):
        return self.seconds * num_tokens

    def close(self):
        self.is_closed = True


def make_engine(proposer, *, cheap=True, graphs=False, **options):
    """Make an engine whose proposer and costs of steps are given."""
    options.setdefault("speculative_config", {"method": "custom", "proposer": print})
    options["speculative_config"].setdefault("num_speculative_tokens", 4)
    engine = LLMEngine(MockModel(VOCAB, 512), num_blocks=256, debug=True, **options)
    if graphs:
        engine.runner.capture_graphs(512, 4)
    engine.speculation._proposer._proposer = proposer
    slope = 0.01 if cheap else 2.0
    table = StepCosts([1], [1, 2], [[1.0, 1.0 + slope]])
    engine.speculation._controller._costs = table
    if graphs:
        engine.speculation._controller._lens = [5]
    return engine


def serve(engine, prompts, **params):
    params = SamplingParams(temperature=0, **({"max_tokens": 40} | params))
    for index, prompt in enumerate(prompts):
        engine.add_request(f"r{index}", prompt, params)
    outputs, num_steps = {}, 0
    while engine.has_unfinished_requests():
        outputs.update((output.request_id, output) for output in engine.step())
        engine.check_integrity()
        num_steps += 1
    for index, prompt in enumerate(prompts):
        got = list(outputs[f"r{index}"].outputs[0].token_ids)
        assert got == MockModel(VOCAB).continuation(prompt, len(got))
    return outputs, num_steps


@pytest.mark.parametrize("is_async", [False, True])
def test_right_drafts_save_steps(is_async):
    proposer = Proposer()
    with make_engine(proposer, async_scheduling=is_async) as engine:
        _, num_steps = serve(engine, [[1, 2], [3]])
        assert num_steps <= 1 + 8 + 2 + is_async  # whose outputs come a step later
        stats = engine.stats().speculation
        assert stats.num_accepted_tokens == stats.num_draft_tokens > 50
        assert stats.acceptance_rate == 1.0 and stats.num_proposer_failures == 0
        assert stats.num_accepted_tokens_per_pos == stats.num_draft_tokens_per_pos
        # Never more than the request can still take, beside the token sampled after them.
        assert all(count >= 1 for step in proposer.asked for _, count, _ in step)
    assert sorted(proposer.forgotten) == ["r0", "r1"] and proposer.is_closed


def test_steps_overlap_again_when_drafts_do_not_pay():
    proposer = Proposer()
    with make_engine(proposer, cheap=False, async_scheduling=True) as engine:
        _, num_steps = serve(engine, [[1, 2]], max_tokens=60)
        assert engine.stats().speculation.num_drafts == 0
        assert 60 < num_steps < 70  # some steps late, as without drafts
        assert not engine.speculation.is_active
        # It looks on while steps overlap.
        assert any(pending for step in proposer.asked for *_, pending in step)


def test_a_costly_proposer_is_asked_only_if_it_pays():
    proposer = Proposer(cost=5.0)
    with make_engine(proposer) as engine:
        serve(engine, [[1, 2]])
        assert not proposer.asked and engine.stats().speculation.num_drafts == 0
    proposer = Proposer(cost=0.01)
    with make_engine(proposer, async_scheduling=True) as engine:
        _, num_steps = serve(engine, [[1, 2]])
        assert num_steps < 15
        assert not any(pending for step in proposer.asked for *_, pending in step)


def test_a_request_can_switch_it_off():
    proposer = Proposer()
    with make_engine(proposer) as engine:
        for name, use in (("on", True), ("off", False)):
            params = SamplingParams(temperature=0, max_tokens=20, use_speculation=use)
            engine.add_request(name, [1, 2, 3], params)
        while engine.has_unfinished_requests():
            engine.step()
    assert {name for step in proposer.asked for name, *_ in step} == {"on"}


def test_it_is_off_for_large_batches():
    proposer = Proposer()
    config = {"method": "custom", "proposer": print, "disable_by_batch_size": 3}
    with make_engine(proposer, speculative_config=config) as engine:
        serve(engine, [[1], [2], [3]])
        assert not proposer.asked
        serve(engine, [[1], [2]])
        assert proposer.asked


def test_graphs_get_the_same_number_of_drafts_for_all():
    """Requests without drafts are padded; what only pads is not counted."""

    class Some(Proposer):
        def drafts(self, request, count):
            right = super().drafts(request, count)
            return {"r0": right, "r1": right.prefix(1), "r2": None}[request.request_id]

    with make_engine(Some(), graphs=True) as engine:
        shapes = []
        launch = engine.runner.graphs.launch

        def recorded(output, rows, starts):
            shapes.append((len(output.sequences), output.num_decodes, output.query_len))
            return launch(output, rows, starts)

        engine.runner.graphs.launch = recorded
        serve(engine, [[1, 2], [3], [4, 5]])
        assert (3, 3, 5) in shapes
        assert {query_len for _, _, query_len in shapes} <= {1, 2, 3, 4, 5}
        stats = engine.stats().speculation
        assert stats.num_accepted_tokens == stats.num_draft_tokens
        assert stats.num_draft_tokens_per_pos[0] > stats.num_draft_tokens_per_pos[1]


def test_graphs_serve_requests_up_to_their_end():
    """Those that are nearer to it than the graph has drafts are padded."""
    with make_engine(Proposer(), graphs=True) as engine:
        shapes, launch = [], engine.runner.graphs.launch

        def recorded(output, rows, starts):
            shapes.append((len(output.sequences), output.num_decodes, output.query_len))
            return launch(output, rows, starts)

        engine.runner.graphs.launch = recorded
        for index, count in enumerate((7, 8, 9, 11)):
            params = SamplingParams(temperature=0, max_tokens=count)
            engine.add_request(f"r{index}", [1 + index], params)
        outputs = {}
        while engine.has_unfinished_requests():
            outputs.update((output.request_id, output) for output in engine.step())
            engine.check_integrity()
        for index, count in enumerate((7, 8, 9, 11)):
            got = list(outputs[f"r{index}"].outputs[0].token_ids)
            assert got == MockModel(VOCAB).continuation([1 + index], count)
        # The first needs one token more when the others get their last drafts.
        assert shapes == [(4, 4, 1), (4, 4, 5), (4, 4, 5)]


def test_outputs_are_made_while_the_next_drafts_are_verified():
    with make_engine(Proposer(), async_scheduling=True) as engine:
        engine.add_request("a", [1, 2], SamplingParams(temperature=0, max_tokens=60))
        num_drafts = []
        while engine.has_unfinished_requests():
            if engine.step():
                num_drafts += [step.output.num_draft_tokens for step in engine._in_flight]
        assert len(num_drafts) > 8 and sum(count > 0 for count in num_drafts) > 8


@pytest.mark.parametrize("is_async", [False, True])
def test_a_row_is_free_when_its_request_ends(is_async):
    """The next request takes it in the step that is launched before the end is reported."""
    with make_engine(Proposer(), async_scheduling=is_async, max_num_seqs=1) as engine:
        serve(engine, [[1, 2], [3], [4, 5], [6]], max_tokens=12)
        assert engine.stats().speculation.num_accepted_tokens > 20


@pytest.mark.parametrize(
    "garbage",
    [
        Drafts((VOCAB,)), Drafts((1, 2, 3, 4, 5)), [1, 2], "abc", 7, np.zeros(3), object(),
        ValueError("no"),
    ],
    ids=["id of no token", "too many", "list", "text", "number", "array", "object", "exception"],
)  # fmt: skip
def test_garbage_is_dropped_and_logged_once(garbage, caplog):
    class Garbage(Proposer):
        def drafts(self, request, count):
            return garbage if request.request_id == "r0" else super().drafts(request, count)

    with caplog.at_level(logging.WARNING), make_engine(Garbage()) as engine:
        serve(engine, [[1, 2], [3]])
        stats = engine.stats().speculation
    assert stats.num_proposer_failures > 3 and stats.num_accepted_tokens > 20
    assert [record.levelname for record in caplog.records].count("WARNING") == 1


@pytest.mark.parametrize("how", ["raises", "wrong number", "not a list"])
def test_a_proposer_that_always_fails_is_given_up(how, caplog):
    class Failing(Proposer):
        def propose(self, wanted):
            super().propose(wanted)
            if how == "raises":
                raise MemoryError("no memory")
            return [None] * 9 if how == "wrong number" else 5

        def forget(self, request):
            raise RuntimeError("forget")

        def close(self):
            raise RuntimeError("close")

    proposer = Failing()
    with caplog.at_level(logging.WARNING), make_engine(proposer) as engine:
        serve(engine, [[1, 2]], max_tokens=60)
        assert len(proposer.asked) == 16
    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR"]


def test_a_callable_of_the_users():
    model = MockModel(VOCAB, 512)

    def guess(token_ids, num_tokens):
        return model.continuation(token_ids, num_tokens)

    with LLMEngine(model, num_blocks=64, speculative_config=guess) as engine:
        assert engine.config.scheduler.max_draft_tokens == 4
        engine.add_request("a", [5], SamplingParams(temperature=0, max_tokens=50))
        while engine.has_unfinished_requests():
            outputs = engine.step()
        assert list(outputs[0].outputs[0].token_ids) == model.continuation([5], 50)
        stats = engine.stats().speculation
        assert stats.num_accepted_tokens == stats.num_draft_tokens
