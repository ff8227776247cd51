"""Links between stages: slots, ids, and engines whose steps follow steps not read yet."""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from engine import SamplingParams
from engine.core.resolve import can_link
from engine.device import CPU
from engine.distributed import links
from engine.distributed.links import Links, SlotShape, num_fused_tokens
from engine.engine_config import EngineConfig
from engine.errors import ContractError, DeviceError, RankError, StepTimeoutError
from engine.parallel.pipeline import PipelinedModel
from engine.runner.model_runner import ModelRunner
from engine.scheduler.spreading import chained_not_due
from tests.distributed.conftest import HostInbox, HostOutbox
from tests.distributed.engines import CONFIG, make_engine, run

FOUR_LAYERS = replace(CONFIG, num_layers=4)


@pytest.fixture
def on_host(monkeypatch):
    monkeypatch.setattr(links, "Inbox", HostInbox)
    monkeypatch.setattr(links, "Outbox", HostOutbox)


linked = pytest.mark.parametrize("in_threads", ["links"], indirect=True)


def _connected(shape, *, num_plain=0):
    """Return the links of a first and a last stage."""
    first = Links(CPU, shape, has_previous=False, num_ids=6)
    last = Links(CPU, shape, has_previous=True)
    first.connect(last.handles[0], b"", 0)
    last.connect(b"", first.handles[1], num_plain)
    return first, last


@pytest.mark.parametrize("num_features", [0, 2])
def test_slots_do_not_overlap(num_features):
    """Each array of each step in flight has its own bytes, within the memory."""
    shape = SlotShape.of(3, num_features, 5, 33, "bfloat16")
    assert shape.num_slots == 4 and shape.num_arrays == 2 + num_features
    starts = [
        shape.offset(step, index)
        for step, index in itertools.product(range(7, 11), range(shape.num_arrays))
    ]
    used = [set(range(start, start + 5 * 33 * 2)) for start in starts]
    assert sum(map(len, used)) == len(set().union(*used))
    assert max(map(max, used)) < shape.num_bytes
    assert all(start % 256 == 0 for start in starts)
    assert shape.offset(7, 1) == shape.offset(11, 1)


def test_activations_arrive_by_step(on_host):
    """The step after next overwrites neither of those before; a delta may be missing."""
    first, last = _connected(SlotShape.of(2, 1, 8, 16, "float32"), num_plain=1)
    rng = np.random.default_rng(0)
    sent = {}
    for step, count in ((4, 8), (5, 1), (6, 3)):
        delta, residual, feature = rng.standard_normal((3, count, 16)).astype(np.float32)
        sent[step] = [None if count == 1 else delta, residual, feature]
        first.send(step, sent[step])
    for step, arrays in sent.items():
        count = len(arrays[1])
        for got, want in zip(last.receive(step, count, count), arrays, strict=True):
            assert (got is None) == (want is None)
            if want is not None:
                np.testing.assert_array_equal(got, want)
    # One token of a graph for two: the previous stage has computed a delta.
    first.send(7, [arrays[:1] for arrays in sent[6]])
    np.testing.assert_array_equal(last.receive(7, 1, 2)[0], sent[6][0][:1])


def test_more_tokens_than_a_slot_holds_are_refused(on_host):
    first, _ = _connected(SlotShape.of(2, 0, 8, 16, "float32"))
    rows = np.zeros((9, 16), np.float32)
    with pytest.raises(ContractError, match=r"at most 8 tokens, which the links hold; got 9"):
        first.send(1, [rows, rows])


def test_ids_arrive_with_their_count(on_host):
    first, last = _connected(SlotShape.of(2, 0, 8, 16, "float32"))
    first.wait_for_ids(0)
    counts = [last.post_ids(np.arange(6, dtype=np.int32) + start) for start in (10, 20)]
    assert counts == [1, 2]
    first.wait_for_ids(2)
    assert first.last_ids.tolist() == [20, 21, 22, 23, 24, 25]
    last.wait_for_ids(99)  # the last stage has its own


def test_which_stages_are_linked():
    one_host = {"pipeline_parallel_size": 2}
    assert can_link(EngineConfig(**one_host), is_cuda=True)
    assert can_link(EngineConfig(**one_host, tensor_parallel_size=2), is_cuda=True)
    for others, is_cuda in (
        ({}, False),
        ({"pipeline_parallel_size": 1}, True),
        ({"pipeline_address": "10.0.0.1:29500"}, True),
        ({"distributed_executor_backend": "ray"}, True),
    ):
        assert not can_link(EngineConfig(**one_host | others), is_cuda=is_cuda)


def test_tokens_without_a_delta():
    fused = SimpleNamespace(is_fused=lambda num_tokens: num_tokens <= 3)
    always = SimpleNamespace(is_fused=lambda num_tokens: True)
    assert num_fused_tokens([always, fused], 9) == 3
    assert num_fused_tokens([always], 9) == 9
    assert num_fused_tokens([always, object()], 9) == 0


# ---- groups of requests


class _Request(SimpleNamespace):
    """Compared by identity, as requests are."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


def _request(pending, *, needs_host_ids=False, num_new=1):
    spec = SimpleNamespace(needs_host_ids=needs_host_ids)
    return _Request(
        num_pending_tokens=pending, num_tokens=num_new, num_computed_tokens=0, spec=spec
    )


def _step(*requests):
    return SimpleNamespace(sequences=[SimpleNamespace(request=r) for r in requests])


def test_groups_take_turns():
    a, b, c, d = requests = [_request(1) for _ in range(4)]
    assert chained_not_due(requests, 2, [_step(a, b), _step(c, d)]) == {c, d}
    assert chained_not_due(requests, 2, [_step(c, d), _step(a, b)]) == {a, b}
    assert chained_not_due(requests, 4, [_step(r) for r in requests]) == {b, c, d}


def test_a_large_group_gives_to_the_next_one():
    """It never takes from one whose step is in flight: it would wait for it."""
    a, b, c, d, e = requests = [_request(1) for _ in range(5)]
    assert chained_not_due(requests, 2, [_step(a, b, c, d), _step(e)]) == {d, e}
    assert chained_not_due(requests, 2, [_step(e), _step(a, b, c)]) == {a, b, c}


def test_a_lone_request_follows_itself_once():
    lone = _request(1)
    assert chained_not_due([lone], 2, [_step(lone)]) == set()
    lone.num_pending_tokens = 2
    assert chained_not_due([lone], 2, [_step(lone), _step(lone)]) == {lone}


def test_requests_that_need_ids_on_the_host_wait_for_them():
    strict, free = _request(1, needs_host_ids=True), _request(1)
    assert chained_not_due([strict, free], 2, [_step(strict, free)]) == {strict}
    strict.num_pending_tokens = 0
    assert chained_not_due([strict, free], 2, [_step(free)]) == {free}


def test_prompts_are_always_due():
    prompt, decode = _request(0, num_new=40), _request(1)
    assert chained_not_due([prompt, decode], 2, [_step(decode)]) == set()


# ---- engines


@pytest.fixture
def announced(monkeypatch):
    """Record the count of ids that each announced step waits for."""
    counts = []
    announce, announce_graph = PipelinedModel.announce, PipelinedModel.announce_graph

    def plain(self, moves, batch, last_ids=links.NO_LAST_IDS):
        counts.append(last_ids.posted)
        announce(self, moves, batch, last_ids)

    def graph(self, moves, staged, posted=0):
        counts.append(posted)
        announce_graph(self, moves, staged, posted)

    monkeypatch.setattr(PipelinedModel, "announce", plain)
    monkeypatch.setattr(PipelinedModel, "announce_graph", graph)
    return counts


@linked
@pytest.mark.parametrize("has_graphs", [False, True])
@pytest.mark.parametrize("num_requests", [1, 4])
def test_steps_follow_steps_not_read(in_threads, announced, num_requests, has_graphs):
    """Each step but the first waits for the ids of the group's last one, not for newer ones."""
    found = {}
    for stages in (1, 2):
        options = {"pipeline_parallel_size": stages, "async_scheduling": True, "debug": True}
        with make_engine(**options) as engine:
            if stages > 1 and has_graphs:
                engine.runner.capture_graphs(engine.config.scheduler.max_model_len)
            for index in range(num_requests):
                params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
                engine.add_request(f"r{index}", [index + 1, 3], params)
            unread = []
            found[stages] = {}
            while engine.has_unfinished_requests():
                for output in engine.step():
                    found[stages][output.request_id] = output.outputs[0].token_ids
                unread += [r.num_pending_tokens for r in engine.scheduler._queues.running]
    assert found[2] == found[1]
    middle = unread[len(unread) // 3 : -len(unread) // 3]
    assert max(middle) == (2 if num_requests == 1 else 1)
    waits = [count for count in announced if count]
    assert len(waits) > 15 and waits == sorted(waits)
    behind = [index - count for index, count in enumerate(announced) if count]
    assert set(behind[2:-2]) == {0 if num_requests == 1 else 1}


@linked
@pytest.mark.parametrize(
    "options",
    [{"async_scheduling": False}, {"speculative_config": {"method": "ngram"}}],
    ids=["not async", "drafts"],
)
def test_steps_that_need_ids_on_the_host_do_not_follow_steps_not_read(in_threads, options):
    with make_engine(pipeline_parallel_size=2, **{"async_scheduling": True, **options}) as engine:
        params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
        engine.add_request("a", [1, 3], params)
        unread = []
        while engine.has_unfinished_requests():
            engine.step()
            unread += [r.num_pending_tokens for r in engine.scheduler._queues.running]
    assert max(unread) == 1


@linked
@pytest.mark.parametrize(
    ("broken", "which"), [("Inbox", 0), ("Inbox", 2), ("Outbox", 0), ("Outbox", 1), ("Outbox", 2)]
)
def test_stages_that_cannot_be_linked_send_messages(in_threads, monkeypatch, caplog, broken, which):
    """One cannot share or map memory: the reason is logged, the tokens are the same."""
    numbers = itertools.count()

    class Broken(getattr(links, broken)):
        def __init__(self, *arguments):
            if next(numbers) == which:
                raise DeviceError("no memory is shared today")
            super().__init__(*arguments)

    before = set(HostInbox.by_handle)
    found = {}
    with make_engine(FOUR_LAYERS) as engine:
        engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=12, temperature=0.0))
        found[1] = run(engine)
    monkeypatch.setattr(links, broken, Broken)
    with (
        caplog.at_level(logging.WARNING, "engine"),
        make_engine(FOUR_LAYERS, pipeline_parallel_size=3) as engine,
    ):
        assert engine.model.links is None and not engine.runner.is_linked
        assert set(HostInbox.by_handle) == before
        engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=12, temperature=0.0))
        found[3] = run(engine)
    assert found[3] == found[1]
    assert "activations go through host memory, since no memory is shared today" in caplog.text


@linked
def test_few_tokens_a_step_and_many_drafts(in_threads):
    """The costs of drafts are measured within the limits of a step."""
    drafting = {"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_min": 1}
    options = {"max_num_seqs": 1, "max_num_batched_tokens": 2, "speculative_config": drafting}
    with make_engine(pipeline_parallel_size=2, **options) as engine:
        engine.add_request("a", [1, 3, 1, 3], SamplingParams(max_tokens=12, temperature=0.0))
        assert run(engine)["a"]


@linked
def test_waits_end_though_a_stage_posts_while_it_ends(in_threads, monkeypatch):
    """What a device still executes undoes an abort: it is repeated when the stages have ended."""
    with make_engine(pipeline_parallel_size=2) as engine:
        group = engine.model.group
        own = HostInbox.by_handle[engine.model.links.handles[0]]
        monkeypatch.setattr(
            "engine.parallel.stage_group.end_processes", lambda *ignored: own.post(1)
        )
        group.fail("stage 0 failed")
        own.wait(3)


@linked
def test_a_closed_engine_keeps_no_links(in_threads):
    before = set(HostInbox.by_handle)
    engine = make_engine(pipeline_parallel_size=2)
    assert len(set(HostInbox.by_handle) - before) == 2  # activations and ids
    own = engine.model.links.handles[0]
    engine.close()
    assert own not in HostInbox.by_handle


@linked
def test_results_of_nothing_look_for_a_dead_rank(in_threads, monkeypatch):
    """A rank of another stage that dies leaves NaN, long before its stage can say so."""
    with make_engine(pipeline_parallel_size=2) as engine:
        engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=12, temperature=0.0))
        group, read = engine.model.group, ModelRunner.read

        def failed(self, step, timeout=None):
            result = read(self, step, timeout)
            result.failed = {sequence.request: "NaN" for sequence in step.output.sequences}
            result.token_ids = {}
            return result

        def say(seconds):
            assert seconds > 0
            raise group.fail("stage 0 failed; its last words: rank 1 was killed")

        monkeypatch.setattr(ModelRunner, "read", failed)
        monkeypatch.setattr(group, "find_failure", say)
        monkeypatch.setattr(engine.model, "num_ranks", 2)
        with pytest.raises(RankError, match="rank 1 was killed"):
            run(engine)


@linked
def test_a_step_that_does_not_end_names_the_stages(in_threads, monkeypatch):
    """The limit is `collective_timeout`; a wait on the device cannot raise."""
    with make_engine(pipeline_parallel_size=2, collective_timeout=3.0) as engine:
        engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=12, temperature=0.0))

        def stuck(self, step, timeout=None):
            assert timeout == 3.0
            raise StepTimeoutError("the device did not finish a step within 3 s")

        monkeypatch.setattr(ModelRunner, "read", stuck)
        with pytest.raises(RankError, match=r"a step did not end within 3 s; stage 0 is in: "):
            run(engine)
