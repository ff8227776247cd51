"""Longrope in the scheduler: the factors follow a sequence's length, and its keys follow them.

`paged_mock` computes with the factors of a request's state, `oracle` with those of the length.
"""

from __future__ import annotations

import itertools

import pytest

from engine.request import RequestStatus
from tests.scheduler.paged_mock import drive, make_request, oracle
from tests.scheduler.test_scheduler import build, chunks, step


def steps_of(scheduler, mock):
    """Run until nothing is left; return the chunks of each step."""
    seen = []
    while scheduler.has_unfinished_requests():
        seen.append(chunks(step(scheduler, mock)[0]))
    return seen


def test_outgrowing_the_short_factors_costs_one_recomputation():
    scheduler, mock = build()
    request = make_request("a", [1] * 18, 5, short_rope_len=20)
    scheduler.add_request(request)
    assert steps_of(scheduler, mock) == [
        [("a", 0, 18)],
        [("a", 18, 1)],
        [("a", 19, 1)],  # a sequence of 20 tokens
        [("a", 0, 21)],  # in the step that would have decoded
        [("a", 21, 1)],
    ]
    assert request.output_token_ids == oracle(request) and request.num_restarts == 1
    stats = scheduler.stats()
    assert stats.num_preemptions == 0 and request.num_cached_tokens == 0


def stopping_prompt(length, count):
    """A prompt after which the mock samples the end of sequence as token number `count`."""
    for head in itertools.product(range(7), repeat=4):
        request = make_request("", [*head, *[2] * (length - 4)], ignore_eos=False)
        request.max_num_tokens = length + count + 1
        if len(oracle(request)) == count:
            return request.prompt_token_ids
    raise AssertionError("no such prompt")


@pytest.mark.parametrize("late", [0, 1, 2])
def test_a_request_that_ends_at_the_border_is_not_computed_anew(late):
    scheduler, mock = build()
    requests = [
        make_request("length", [1] * 18, 3, short_rope_len=20),
        make_request("stop", stopping_prompt(18, 3), 9, ignore_eos=False, short_rope_len=20),
    ]
    for request in requests:
        scheduler.add_request(request)
    drive(scheduler, mock, late=late)
    for request in requests:
        assert request.output_token_ids == oracle(request) and request.num_output_tokens == 3
        assert request.num_restarts == 0, request.request_id


def test_a_long_prompt_has_the_long_factors_from_its_first_chunk():
    scheduler, mock = build(max_prefill_chunk=16)
    request = make_request("a", [1] * 40, 2, short_rope_len=32)
    scheduler.add_request(request)
    assert steps_of(scheduler, mock) == [
        [("a", 0, 16)], [("a", 16, 16)], [("a", 32, 8)], [("a", 40, 1)],
    ]  # fmt: skip
    assert request.output_token_ids == oracle(request)


def test_prefixes_are_shared_by_length_whatever_the_limits():
    scheduler, mock = build()
    found = {}
    for name, length, max_tokens in [
        ("short", 33, 1), ("short, may grow", 33, 200), ("long", 49, 1), ("long, may grow", 50, 9),
    ]:  # fmt: skip
        request = make_request(name, [1] * length, max_tokens, short_rope_len=40)
        scheduler.add_request(request)
        while not request.num_output_tokens:
            step(scheduler, mock)
        found[name] = request.num_cached_tokens
        scheduler.finish_request(request, "abort")
    assert found == {"short": 0, "short, may grow": 32, "long": 0, "long, may grow": 48}


@pytest.mark.parametrize("late", [0, 1])
def test_many_requests_outgrow_them_together(late):
    scheduler, mock = build(num_blocks=16, watermark=0.0, max_num_seqs=8)
    requests = [make_request(f"r{i}", [i % 3] * (10 + i), 40, short_rope_len=30) for i in range(12)]
    for request in requests:
        scheduler.add_request(request)
    drive(scheduler, mock, late=late)
    assert all(r.output_token_ids == oracle(r) and r.num_restarts for r in requests)


def test_keys_of_a_request_that_outgrows_them_are_not_swapped_out():
    scheduler, mock = build(num_host_blocks=8, preemption="swap")
    request = make_request("a", [1] * 19, 5, short_rope_len=20)
    scheduler.add_request(request)
    step(scheduler, mock)
    assert scheduler.blocks.can_swap_out(request)
    output = scheduler.schedule()  # it has 21 tokens now; the last is pending
    assert (request.num_tokens, request.long_rope) == (21, False)
    assert not scheduler.blocks.can_swap_out(request)
    scheduler.commit(output, mock.run(output))
    drive(scheduler, mock)
    assert request.output_token_ids == oracle(request)


def test_a_swapped_request_outgrows_them_after_it_is_back():
    scheduler, mock = build(num_host_blocks=8, preemption="swap")
    request = make_request("a", [1] * 17, 9, short_rope_len=20)
    scheduler.add_request(request)
    step(scheduler, mock)
    scheduler._queues.preempt_last(swap=True)
    assert request.status is RequestStatus.SWAPPED
    drive(scheduler, mock)
    assert request.output_token_ids == oracle(request) and request.num_restarts == 2


@pytest.mark.parametrize(("kept", "is_shared"), [(1, True), (2, True), (3, False), (4, True)])
def test_a_fork_shares_blocks_with_keys_of_its_own_factors_only(kept, is_shared):
    """The parent has 21, 22 and 23 tokens when it forks; the child up to 20 has short factors."""
    scheduler, mock = build()
    parent = make_request("parent", [1] * 18, 20, short_rope_len=20)
    scheduler.add_request(parent)
    for _ in range(kept):
        step(scheduler, mock)
    assert parent.num_tokens == 18 + kept
    child = make_request("child", [1] * 18, 20, short_rope_len=20)
    child.output_token_ids = [*parent.output_token_ids[: kept - 1], 6]
    scheduler.fork_request(parent, child)
    assert bool(child.block_table) == is_shared
    drive(scheduler, mock)
    assert parent.output_token_ids == oracle(parent)
    assert child.output_token_ids == oracle(child, kept)


@pytest.mark.parametrize("length", [19, 20, 21])
def test_parallel_samples_outgrow_them_one_by_one(length):
    scheduler, mock = build()
    samples = [make_request(f"s{i}", [1] * length, 6, short_rope_len=20) for i in range(4)]
    scheduler.add_request(samples[0], siblings=samples[1:])
    drive(scheduler, mock)
    assert all(sample.output_token_ids == oracle(sample) for sample in samples)


@pytest.mark.parametrize("is_tree", [False, True])
def test_drafts_end_at_the_border(is_tree):
    """A logit beyond it would be that of other factors, and all accepted drafts would be wrong."""
    scheduler, mock = build(max_draft_tokens=8)
    request = make_request("a", [1] * 15, 30, short_rope_len=20)
    scheduler.add_request(request)
    seen = []
    while scheduler.has_unfinished_requests():
        start = request.num_output_tokens
        ids = oracle(request)[start : start + 8]
        parents = [i - 1 for i in range(len(ids))] if is_tree else None
        scheduler.propose(request, ids, parents)
        output, _ = step(scheduler, mock)
        (sequence,) = output.sequences
        seen.append((sequence.start, sequence.num_scheduled_tokens, sequence.num_draft_tokens))
    assert seen == [(0, 15, 0), (15, 5, 4), (0, 21, 0), (21, 9, 8), (30, 9, 8), (39, 6, 5)]
    assert request.output_token_ids == oracle(request)
    assert mock.num_rejected == 0


def test_a_failed_step_across_the_border_is_computed_again():
    scheduler, mock = build()
    request = make_request("a", [1] * 19, 6, short_rope_len=20)
    scheduler.add_request(request)
    step(scheduler, mock)
    step(scheduler, mock)
    output = scheduler.schedule()
    assert output.restarted == [request] and chunks(output) == [("a", 0, 21)]
    scheduler.rollback(output)
    assert request.status is RequestStatus.PREEMPTED and request.prefix_key == (None, True, 0, 0)
    drive(scheduler, mock)
    assert request.output_token_ids == oracle(request)
