"""Drafts: proposals, how many of them a step takes, and which are accepted."""

from __future__ import annotations

import numpy as np
import pytest

from engine.drafts import Drafts
from engine.errors import RequestError
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.scheduler import Scheduler
from tests.scheduler.paged_mock import PagedMock, make_request, oracle


def make_scheduler(**options):
    options = {"num_blocks": 32, "max_model_len": 200, "max_draft_tokens": 20, **options}
    config = SchedulerConfig(debug=True, **options)
    return Scheduler(config), PagedMock(config)


def decoding(scheduler, mock, *requests):
    """Add the requests, and compute their prompts in one step."""
    for request in requests:
        scheduler.add_request(request)
    output = scheduler.schedule()
    scheduler.commit(output, mock.run(output))


def next_tokens(request, count):
    start = request.num_output_tokens
    return oracle(request)[start : start + count]


def test_accepted_rows_of_a_chain():
    chain = Drafts((4, 5, 6))
    assert chain.accepted_rows([4, 5, 6, 9]) == [0, 1, 2, 3]
    assert chain.accepted_rows([4, 9, 6, 9]) == [0, 1]
    assert chain.accepted_rows([9, 5, 6, 9]) == [0]
    assert chain.moves([0, 1, 2, 3]) == [] and chain.moves([0]) == []
    assert not chain.is_tree and chain.depths == (1, 2, 3)
    assert chain.masks(2) == [0b1, 0b11, 0b111, 0b1111, 0b11111]


def test_accepted_rows_of_a_tree():
    #  4 -> 5 -> 6      (0, 1, 4)
    #    -> 7           (2)
    #  8 -> 5           (3, 5)
    tree = Drafts((4, 5, 7, 8, 6, 5), (-1, 0, 0, -1, 1, 3))
    assert tree.is_tree and tree.depths == (1, 2, 2, 1, 3, 2)
    assert tree.chain() == Drafts((4, 5)) and tree.prefix(4).parents == (-1, 0, 0, -1)
    assert tree.accepted_rows([4, 7, 0, 9, 0, 0, 0]) == [0, 1, 3]
    assert tree.accepted_rows([8, 0, 0, 0, 5, 0, 1]) == [0, 4, 6]
    assert tree.accepted_rows([4, 5, 6, 0, 0, 2, 0]) == [0, 1, 2, 5]
    assert tree.moves([0, 1, 3]) == [(2, 1)]  # the key of 7 is after that of 5
    assert tree.moves([0, 1, 2, 5]) == [(4, 2)]  # the key of 6 is after that of 8
    assert tree.moves([0, 4, 6]) == [(3, 0), (5, 1)] and tree.moves([0]) == []
    assert tree.path(5) == (4, 5, 6) and tree.path(6) == (8, 5) and tree.path(0) == ()


def test_masks_show_ancestors_and_known_tokens_only():
    rng = np.random.default_rng(1)
    for _ in range(50):
        count, known = int(rng.integers(1, 12)), int(rng.integers(1, 4))
        parents = tuple(int(rng.integers(-1, i)) for i in range(count))
        masks = Drafts(tuple(range(count)), parents).masks(known)
        for i in range(count):
            seen, at = {*range(known)}, i
            while at >= 0:
                seen.add(known + at)
                at = parents[at]
            assert masks[known + i] == sum(1 << j for j in seen)


@pytest.mark.parametrize(
    ("token_ids", "parents", "words"),
    [
        ((1, -2), None, "whole numbers"),
        ((1, 2.0), None, "whole numbers"),
        ((1, 2), (-1,), "indices of earlier drafts"),
        ((1, 2), (-1, 1), "indices of earlier drafts"),
        ((3, 3), (-1, -1), "must differ"),
        (tuple(range(21)), None, "max_draft_tokens = 20"),
    ],
)
def test_an_invalid_proposal_is_rejected(token_ids, parents, words):
    scheduler, mock = make_scheduler()
    request = make_request("a", [1, 2, 3])
    decoding(scheduler, mock, request)
    with pytest.raises(RequestError, match=words):
        scheduler.propose(request, token_ids, parents)
    assert request.drafts is None


@pytest.mark.parametrize("num_right", [0, 1, 4, 5])
def test_a_step_verifies_all_drafts(num_right):
    scheduler, mock = make_scheduler()
    request = make_request("a", [1, 2, 3], max_tokens=30)
    decoding(scheduler, mock, request)
    right = next_tokens(request, 6)
    ids = [*right[:num_right], *((t + 1) % 7 for t in right[num_right:5])]
    assert scheduler.propose(request, ids)
    output = scheduler.schedule()
    (sequence,) = output.sequences
    assert (sequence.num_scheduled_tokens, sequence.num_draft_tokens, sequence.num_logits) == (
        6,
        5,
        6,
    )
    assert (output.num_decodes, output.query_len, output.num_scheduled_tokens) == (1, 6, 6)
    assert scheduler.schedule().is_empty  # its length is not known yet
    scheduler.commit(output, mock.run(output))
    assert request.num_output_tokens == 1 + num_right + 1
    assert request.num_computed_tokens == request.num_tokens - 1
    assert request.drafts is None and request.num_draft_tokens == 0


def test_keys_of_an_accepted_branch_after_another_one_are_moved():
    scheduler, mock = make_scheduler()
    request = make_request("a", [1, 2, 3], max_tokens=30)
    decoding(scheduler, mock, request)
    first, second = next_tokens(request, 2)
    assert scheduler.propose(request, [(first + 1) % 7, first, second], [-1, -1, 1])
    output = scheduler.schedule()
    scheduler.commit(output, mock.run(output))
    assert request.num_output_tokens == 1 + 3
    assert request.num_tokens - request.num_computed_tokens == 1
    output = scheduler.schedule()
    assert output.sequences[0].num_scheduled_tokens == 1
    scheduler.commit(output, mock.run(output))
    assert request.output_token_ids == oracle(request)[: request.num_output_tokens]


def test_what_drafts_beyond_max_tokens_give_is_dropped():
    scheduler, mock = make_scheduler()
    request = make_request("a", [1, 2, 3], max_tokens=4)
    decoding(scheduler, mock, request)
    assert scheduler.propose(request, [*next_tokens(request, 3), 7, 8])
    output = scheduler.schedule()
    assert output.sequences[0].num_draft_tokens == 5
    assert scheduler.commit(output, mock.run(output)) == [request]
    assert request.output_token_ids == oracle(request) and request.finish_reason == "length"


def test_drafts_are_cut_at_max_model_len():
    scheduler, mock = make_scheduler(max_model_len=7)
    request = make_request("a", [1, 2, 3], max_tokens=4)
    decoding(scheduler, mock, request)
    assert scheduler.propose(request, [*next_tokens(request, 3), 7, 8])
    output = scheduler.schedule()
    assert output.sequences[0].num_draft_tokens == 3
    assert scheduler.commit(output, mock.run(output)) == [request]
    assert request.output_token_ids == oracle(request) and request.finish_reason == "length"


def test_a_stop_id_inside_accepted_drafts_ends_the_request():
    scheduler, mock = make_scheduler()
    request = make_request("a", [1, 2, 3], max_tokens=50, ignore_eos=False)
    decoding(scheduler, mock, request)
    while not request.is_finished:
        rest = next_tokens(request, 20)
        scheduler.propose(request, [*rest, 1, 2, 3][:20])
        output = scheduler.schedule()
        scheduler.commit(output, mock.run(output))
    assert request.finish_reason == "stop" and request.output_token_ids == oracle(request)


def test_drafts_take_no_budget_from_other_requests():
    scheduler, mock = make_scheduler(max_num_seqs=4, max_num_batched_tokens=16)
    requests = [make_request(name, [1, 2, 3], max_tokens=30) for name in "abcd"]
    decoding(scheduler, mock, *requests)
    for request in requests:
        assert scheduler.propose(request, next_tokens(request, 10))
    output = scheduler.schedule()
    assert [s.num_scheduled_tokens for s in output.sequences if s.request is requests[0]] == [11]
    assert output.num_scheduled_tokens == 16 and len(output.sequences) == 4
    scheduler.commit(output, mock.run(output))


def test_a_long_prompt_delays_no_decode_because_of_its_drafts():
    """The prompt comes first in service order, and would take the budget of many steps."""
    scheduler, mock = make_scheduler(max_num_seqs=4, max_num_batched_tokens=16)
    request = make_request("a", [1, 2, 3], max_tokens=30)
    decoding(scheduler, mock, request)
    urgent = make_request("b", [1] * 120, max_tokens=2, priority=-1)
    scheduler.add_request(urgent)
    for count in range(1, 8):
        assert request.num_output_tokens == count and not urgent.output_token_ids
        assert scheduler.propose(request, [(next_tokens(request, 1)[0] + 1) % 7] * 3)
        output = scheduler.schedule()
        assert output.num_scheduled_tokens == 16
        scheduler.commit(output, mock.run(output))


def test_drafts_preempt_no_request():
    scheduler, mock = make_scheduler(num_blocks=3, prefix_caching=False, watermark=0.0)
    a, b = (make_request(name, [1] * 15, max_tokens=15) for name in "ab")
    decoding(scheduler, mock, a, b)
    assert scheduler.propose(a, next_tokens(a, 12)) and scheduler.propose(b, next_tokens(b, 12))
    output = scheduler.schedule()
    assert not output.preempted
    assert sorted(s.num_draft_tokens for s in output.sequences) == [0, 12]
    scheduler.commit(output, mock.run(output))


@pytest.mark.parametrize("num_drafts", [0, 8])
def test_drafts_leave_the_last_block_to_a_request_that_needs_it(num_drafts):
    """Of three blocks, one is free when the second request is at the end of its own."""
    scheduler, mock = make_scheduler(num_blocks=3, prefix_caching=False, watermark=0.0)
    first = make_request("a", [1] * 8, max_tokens=8)
    second = make_request("b", [2] * 16, max_tokens=5)
    decoding(scheduler, mock, first, second)
    while scheduler.has_unfinished_requests():
        for request in (first, second):
            if num_drafts and not request.is_finished:
                scheduler.propose(request, [9] * num_drafts)
        output = scheduler.schedule()
        scheduler.commit(output, mock.run(output))
    assert scheduler.stats().num_preemptions == 0


def test_a_request_with_drafts_gets_its_block_before_later_requests_go_on():
    """The later one, without drafts, needs no block for 14 more tokens."""
    scheduler, mock = make_scheduler(num_blocks=3, prefix_caching=False, watermark=0.0)
    first = make_request("a", [1] * 16, max_tokens=8)
    later = make_request("b", [2] * 17, max_tokens=16)
    decoding(scheduler, mock, first, later)
    assert scheduler.propose(first, [*next_tokens(first, 2), 9])
    output = scheduler.schedule()
    assert output.preempted == [later] and output.num_draft_tokens == 0
    scheduler.commit(output, mock.run(output))
    assert first.num_output_tokens == 2


def test_decodes_of_the_most_frequent_length_come_first():
    scheduler, mock = make_scheduler()
    requests = [make_request(name, [1, 2, 3], max_tokens=30) for name in "abcde"]
    decoding(scheduler, mock, *requests)
    for request, count in zip(requests, (0, 3, 3, 3, 5), strict=True):
        scheduler.propose(request, next_tokens(request, count))
    tree = requests[4]
    ids = next_tokens(tree, 3)
    scheduler.propose(tree, [*ids, (ids[0] + 1) % 7], [-1, 0, 1, -1])  # truncated to a chain
    output = scheduler.schedule()
    assert (output.num_decodes, output.query_len) == (3, 4)
    others = {s.request: s.num_scheduled_tokens for s in output.sequences[3:]}
    assert others == {requests[0]: 1, tree: 4}
    scheduler.commit(output, mock.run(output))
    assert [r.num_output_tokens for r in requests] == [2, 5, 5, 5, 5]


def test_a_failed_step_drops_its_drafts():
    scheduler, mock = make_scheduler()
    request = make_request("a", [1, 2, 3], max_tokens=30)
    decoding(scheduler, mock, request)
    scheduler.propose(request, next_tokens(request, 5))
    scheduler.rollback(scheduler.schedule())
    assert request.drafts is None and request.num_draft_tokens == 0
    output = scheduler.schedule()
    assert output.num_draft_tokens == 0
    scheduler.commit(output, mock.run(output))
    assert request.output_token_ids == oracle(request)[:2]


def test_a_waiting_request_ignores_proposals():
    scheduler, _ = make_scheduler()
    request = make_request("a", [1, 2, 3])
    scheduler.add_request(request)
    assert not scheduler.propose(request, [1])


def test_drafts_of_a_prefill_that_failed_are_dropped():
    """Before its last chunk, when no token was sampled yet."""
    scheduler, mock = make_scheduler(max_num_batched_tokens=256, max_prefill_chunk=5)
    request = make_request("a", [1] * 12, max_tokens=30)
    scheduler.add_request(request)
    output = scheduler.schedule()
    assert scheduler.propose(request, [1, 2, 3])
    scheduler.rollback(output)
    assert request.drafts is None
    while not request.is_finished:
        output = scheduler.schedule()
        scheduler.commit(output, mock.run(output))
    assert request.output_token_ids == oracle(request)
