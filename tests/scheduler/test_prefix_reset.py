"""A reset of the prefix cache: what it frees, and what requests that span it share afterwards."""

from __future__ import annotations

import random

import pytest

from engine.scheduler.config import SchedulerConfig
from engine.scheduler.scheduler import Scheduler
from tests.scheduler.paged_mock import PagedMock, drive, make_request, oracle

PROMPT = [3, 1, 2, 5] * 20  # five blocks


def build(**options):
    """A scheduler in debug mode, and its mock."""
    defaults = {"num_blocks": 32, "max_model_len": 256, "max_num_seqs": 8, "debug": True}
    config = SchedulerConfig(**{"max_num_batched_tokens": 48, **defaults, **options})
    return Scheduler(config), PagedMock(config)


def step(scheduler, mock):
    output = scheduler.schedule()
    scheduler.commit(output, mock.run(output))


def served(scheduler, mock, name, prompt=PROMPT, **fields):
    """Serve one request; return the number of tokens that it found cached."""
    request = make_request(name, prompt, **fields)
    scheduler.add_request(request)
    drive(scheduler, mock)
    assert request.output_token_ids == oracle(request)
    return request.num_cached_tokens


def test_a_reset_frees_what_no_request_uses():
    scheduler, mock = build()
    assert scheduler.reset_prefix_cache() == 0
    assert served(scheduler, mock, "a") == 0
    assert served(scheduler, mock, "b") == 64  # the prompt's last block is computed again
    num_cached = scheduler.stats().num_cached_blocks
    assert num_cached > 0
    assert scheduler.reset_prefix_cache() == num_cached
    assert scheduler.stats().num_free_blocks == 32
    assert served(scheduler, mock, "c") == 0


def test_blocks_in_host_memory_are_freed_too():
    scheduler, mock = build(num_blocks=8, num_host_blocks=8)
    served(scheduler, mock, "a")
    served(scheduler, mock, "b", [7] * 100)  # moves the first prefix to the host
    stats = scheduler.stats()
    on_host = stats.num_host_blocks - stats.num_free_host_blocks
    assert on_host > 0
    assert scheduler.reset_prefix_cache() == on_host + stats.num_cached_blocks
    stats = scheduler.stats()
    assert (stats.num_free_blocks, stats.num_free_host_blocks) == (8, 8)
    assert served(scheduler, mock, "c") == 0


@pytest.mark.parametrize("num_steps", [1, 2, 5])  # inside the prompt, at its end, while decoding
def test_a_running_request_continues_but_later_ones_share_nothing_with_it(num_steps):
    scheduler, mock = build()
    old = make_request("old", PROMPT, 20)
    scheduler.add_request(old)
    for _ in range(num_steps):
        step(scheduler, mock)
    num_computed = old.num_computed_tokens
    assert scheduler.reset_prefix_cache() == 0  # all of its blocks are in use
    assert old.num_computed_tokens == num_computed > 0
    new = make_request("new", PROMPT)
    scheduler.add_request(new)
    drive(scheduler, mock)
    assert old.output_token_ids == oracle(old) and new.output_token_ids == oracle(new)
    assert new.num_cached_tokens == 0
    longer = [*PROMPT, *old.output_token_ids]
    assert served(scheduler, mock, "later", longer) == 80  # of the new request, not of the old
    stats = scheduler.stats()
    assert stats.num_free_blocks + stats.num_cached_blocks == 32


def test_a_waiting_request_shares_with_later_ones():
    scheduler, mock = build(max_num_seqs=1)
    first = make_request("first", [9] * 20, 4)
    waiting = make_request("waiting", PROMPT)
    scheduler.add_request(first)
    scheduler.add_request(waiting)
    step(scheduler, mock)
    scheduler.reset_prefix_cache()
    drive(scheduler, mock)
    assert served(scheduler, mock, "later") == 64
    assert served(scheduler, mock, "another", [9] * 20) == 0


def test_parallel_samples_share_across_a_reset():
    scheduler, mock = build()
    group = [make_request(f"r{i}", PROMPT, 6) for i in range(3)]
    scheduler.add_request(group[0], group[1:])
    step(scheduler, mock)  # part of the common prompt
    scheduler.reset_prefix_cache()
    drive(scheduler, mock)
    assert [request.num_cached_tokens for request in group[1:]] == [79, 79]
    assert all(request.output_token_ids == oracle(request) for request in group)
    assert served(scheduler, mock, "later") == 0


def test_a_fork_continues_a_request_from_before_the_reset():
    scheduler, mock = build()
    parent = make_request("parent", PROMPT, 20)
    scheduler.add_request(parent)
    for _ in range(4):
        step(scheduler, mock)
    scheduler.reset_prefix_cache()
    child = make_request("child", PROMPT, 12)
    child.output_token_ids = [*parent.output_token_ids[:-1], 0]
    given = child.num_output_tokens
    scheduler.fork_request(parent, child)
    assert child.num_computed_tokens > len(PROMPT)
    drive(scheduler, mock)
    assert child.output_token_ids == oracle(child, given)
    assert served(scheduler, mock, "later") == 0


@pytest.mark.parametrize("swaps", [False, True])
def test_a_request_preempted_after_a_reset_keeps_its_own_prefix(swaps):
    scheduler, mock = build(
        num_blocks=10, num_host_blocks=10, preemption="swap" if swaps else "recompute"
    )
    requests = [make_request(f"r{i}", [i, *PROMPT[1:40]], 60) for i in range(3)]
    for request in requests:
        scheduler.add_request(request)
    for _ in range(3):
        step(scheduler, mock)
    scheduler.reset_prefix_cache()
    drive(scheduler, mock)
    assert sum(request.num_preemptions for request in requests) > 0
    assert all(request.output_token_ids == oracle(request) for request in requests)
    for index in range(3):
        assert served(scheduler, mock, f"later{index}", [index, *PROMPT[1:40]]) == 0
    scheduler.reset_prefix_cache()
    stats = scheduler.stats()
    assert (stats.num_free_blocks, stats.num_free_host_blocks) == (10, 10)


@pytest.mark.parametrize("seed", range(12))
def test_no_request_finds_keys_from_before_the_last_reset(seed):
    """A cached token was computed by a request that started after the last reset, or by itself."""
    rng = random.Random(seed)
    preemption = rng.choice(["swap", "auto", "recompute"])
    num_host_blocks = 8 if preemption == "swap" else rng.choice([0, 8])
    scheduler, mock = build(num_blocks=14, num_host_blocks=num_host_blocks, preemption=preemption)
    num_hits = 0
    seen = set()  # requests that have had blocks
    old = set()  # requests that had blocks at the last reset
    since = set()  # prompts of the others that have had blocks since
    for turn in range(120):
        choice = rng.random()
        if choice < 0.25:
            kind = rng.randrange(3)
            scheduler.add_request(make_request(f"r{turn}", [kind] * 40, rng.randrange(2, 30)))
        elif choice < 0.35:
            scheduler.reset_prefix_cache()
            old = {
                r for r in scheduler.unfinished_requests() if r.block_table or r.host_block_table
            }
            since.clear()
        else:
            step(scheduler, mock)
        holding = {request for request in scheduler.unfinished_requests() if request.block_table}
        for request in holding - seen:
            num_hits += request.num_cached_tokens > 0
            assert not request.num_cached_tokens or request.prompt_token_ids[0] in since
        seen |= holding
        since |= {request.prompt_token_ids[0] for request in holding - old}
    drive(scheduler, mock)
    scheduler.check_integrity()
    scheduler.reset_prefix_cache()
    assert scheduler.stats().num_free_blocks == 14
    assert num_hits > 0
