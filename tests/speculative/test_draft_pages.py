"""A draft model's keys follow what happens to a request's tokens and blocks, without an engine."""

from __future__ import annotations

import pytest

from engine.cache.block_manager import BlockManager
from engine.cache.memory_pool import MemoryPool
from engine.device import CPU
from engine.request import Request
from engine.runner.sampling import SamplingSpec
from engine.sampling_params import SamplingParams
from engine.scheduler.config import SchedulerConfig
from engine.speculative.draft_model import DraftModelProposer
from engine.speculative.draft_pages import DraftPages, SequencePages
from tests.e2e.tiny import VOCAB, greedy_alone, tiny_model

COUNT = 4


@pytest.fixture(scope="module")
def model():
    return tiny_model(deterministic=True)


@pytest.fixture(params=[False, True], ids=["launches", "graphs"])
def proposer(request, model, monkeypatch):
    limits = SchedulerConfig(num_blocks=32, max_model_len=200, max_draft_tokens=COUNT)
    generations = [0] * limits.num_blocks
    made = DraftModelProposer(model, VOCAB, MemoryPool(CPU), limits, COUNT, generations)
    made.generations = generations
    monkeypatch.setattr(model, "close", lambda: None)
    if request.param:
        made.capture_graphs()
    yield made
    made.close()


def make_request(name, prompt, blocks, output=()):
    params = SamplingParams(temperature=0)
    request = Request(name, list(prompt), params, spec=SamplingSpec(params, seed=0))
    request.block_table, request.max_num_tokens = list(blocks), 200
    request.append_tokens(output or [prompt[-1]])
    return request


def drafts_of(proposer, *requests):
    """Return the proposals; what the model generates by itself after the known tokens."""
    given = proposer.propose([(request, COUNT) for request in requests])
    return [None if drafts is None else list(drafts.token_ids) for drafts in given]


def free(proposer, blocks):
    """Do what the allocator does when blocks become free."""
    for block in blocks:
        proposer.generations[block] += 1


def right(model, request):
    return greedy_alone(model, request.token_ids(0, 999), COUNT, eos=False)


def other_than(token):
    return 4 + (token - 3) % (VOCAB - 4)


@pytest.mark.parametrize("num_accepted", range(COUNT + 1))
def test_any_number_of_accepted_drafts(proposer, model, num_accepted):
    """The token after them differs from the next draft; the table grows when it must."""
    request = make_request("r", [5, 6, 7], [3])
    free = iter(range(4, 30))
    for _ in range(12):
        (ids,) = drafts_of(proposer, request)
        assert ids == right(model, request)
        wrong = other_than(ids[num_accepted]) if num_accepted < COUNT else 9
        request.append_tokens([*ids[:num_accepted], wrong])
        while 16 * len(request.block_table) < request.num_known_tokens - 1:
            request.block_table.append(next(free))


def test_two_that_share_a_block_until_one_is_copied(proposer, model):
    prompt = list(range(10, 30))
    one = make_request("one", prompt, [3, 4], [8])
    two = make_request("two", prompt, [3, 4], [9])
    one.shares_last_block = two.shares_last_block = True
    for _ in range(3):  # chunks of their own pages first
        drafts_of(proposer, one, two)
    assert drafts_of(proposer, one, two) == [right(model, one), right(model, two)]
    one.shares_last_block = two.shares_last_block = False
    two.block_table = [3, 5]
    for request in (one, two):
        request.append_tokens([11, 12])
    assert drafts_of(proposer, one, two) == [right(model, one), right(model, two)]


def test_a_request_that_resumes_in_blocks_that_another_had_in_between(proposer, model):
    one = make_request("one", range(10, 45), [3, 4, 5])
    assert drafts_of(proposer, one) == [right(model, one)]
    two = make_request("two", range(40, 75), [3, 4, 5])
    free(proposer, [3, 4, 5])
    assert drafts_of(proposer, two) == [right(model, two)]
    one.num_restarts = 1
    free(proposer, [3, 4, 5])
    assert drafts_of(proposer, one) == [right(model, one)]


def test_a_block_with_half_of_something_else(proposer, model):
    """A full block is overwritten in part by a request that ends; then its first owner's text."""
    one = make_request("one", range(10, 45), [3, 4, 5])
    assert drafts_of(proposer, one) == [right(model, one)]
    proposer.forget(one)
    free(proposer, [3, 4, 5])
    two = make_request("two", [50, 51, 52], [4])
    assert drafts_of(proposer, two) == [right(model, two)]
    proposer.forget(two)
    free(proposer, [4])
    three = make_request("three", range(10, 45), [3, 4, 5])
    assert drafts_of(proposer, three) == [right(model, three)]


def test_only_what_is_missing_is_computed(proposer, model):
    launched = []
    launch = proposer.runner.launch

    def counted(output):
        launched.append(output.num_scheduled_tokens)
        return launch(output)

    proposer.runner.launch = counted
    one = make_request("one", range(10, 60), [3, 4, 5, 6])
    assert drafts_of(proposer, one) == [right(model, one)]
    assert sum(launched) == 51 + COUNT - 1
    launched.clear()
    two = make_request("two", [*range(10, 58), 80, 81], [3, 4, 5, 7])  # three blocks are the same
    assert drafts_of(proposer, two) == [right(model, two)]
    assert sum(launched) == 3 + COUNT - 1
    launched.clear()
    drafts_of(proposer, one)  # nothing has changed: its last tokens again
    assert sum(launched) <= 2 + COUNT - 1


def test_drafts_end_where_pages_end(proposer, model):
    """With one spare block, and with none of the model's positions left."""
    request = make_request("r", range(10, 40), [3])  # its table has too few blocks for 31 tokens
    (ids,) = drafts_of(proposer, request)
    assert ids == right(model, request)[:2]  # the keys of the second are in the last slot
    request = make_request("s", [10 + i % 40 for i in range(197)], range(4, 17))
    (ids,) = drafts_of(proposer, request)
    assert ids == right(model, request)[: 200 - 198 + 1]


def test_blocks_of_another_rope_or_generation_are_computed_again():
    generations = [0] * 8
    pages = DraftPages(16, generations)
    one, two = (make_request(name, range(10, 42), [3, 4]) for name in "ab")
    first = SequencePages([9])
    pages.follow(first, one)
    pages.computed(first, 32)

    def num_valid(long_rope):
        sequence = SequencePages([10], long_rope)
        pages.follow(sequence, two)
        return sequence.num_valid

    assert num_valid(long_rope=True) == 0
    assert num_valid(long_rope=False) == 32
    generations[4] += 1
    assert num_valid(long_rope=False) == 16
    generations[3] += 1
    assert num_valid(long_rope=False) == 0


def test_a_fork_does_not_take_over_what_its_parent_knew_beyond_it():
    """The draft model fills the block with the parent's last token, which the fork replaces."""
    manager = BlockManager(8, 16)
    pages = DraftPages(16, manager.allocator.generations)
    parent = Request("parent", range(10, 25), SamplingParams(), spec=None)
    assert manager.admit(parent)
    parent.num_computed_tokens = parent.num_committed_tokens = 15
    parent.append_tokens([30])
    child = Request("child", parent.prompt_token_ids, SamplingParams(), spec=None)
    child.append_tokens([31])
    of_parent, of_child = SequencePages([8]), SequencePages([9])
    pages.follow(of_parent, parent)
    pages.computed(of_parent, 16)
    manager.fork(parent, child)
    for request in (parent, child):
        assert manager.grow(request, request.num_tokens)
    pages.follow(of_child, child)
    assert child.block_table == [0] and of_child.num_valid == 0
    pages.follow(of_parent, parent)
    assert of_parent.num_valid == 0  # copied
