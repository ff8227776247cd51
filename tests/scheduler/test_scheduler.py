"""Scheduler: order, budget, chunks, limits, preemption, swap, forks."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace

import pytest

from engine.errors import ConfigError, ContextLengthError, ContractError, RequestError
from engine.request import RequestStatus
from engine.scheduler.admission import QueueFullError
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.scheduler import Scheduler
from tests.scheduler.paged_mock import PagedMock, drive, make_request, oracle


def build(**options):
    """A scheduler in debug mode, and its mock."""
    defaults = {"num_blocks": 32, "max_model_len": 256, "max_num_seqs": 8, "debug": True}
    config = SchedulerConfig(**{"max_num_batched_tokens": 64, **defaults, **options})
    return Scheduler(config), PagedMock(config)


def step(scheduler, mock):
    """One step; returns (output, finished requests)."""
    output = scheduler.schedule()
    return output, scheduler.commit(output, mock.run(output))


def chunks(output):
    """(request id, start, number of tokens) of a step."""
    return [(s.request.request_id, s.start, s.num_scheduled_tokens) for s in output.sequences]


def test_decodes_come_first_and_prefills_fill_the_budget():
    scheduler, mock = build(max_num_batched_tokens=32)
    scheduler.add_request(make_request("a", [1] * 10))
    step(scheduler, mock)
    scheduler.add_request(make_request("b", [2] * 50))
    scheduler.add_request(make_request("c", [3] * 8))
    output, _ = step(scheduler, mock)
    assert chunks(output) == [("a", 10, 1), ("b", 0, 31)]
    assert (output.num_decodes, output.num_scheduled_tokens) == (1, 32)
    assert not output.sequences[1].is_sampled
    output, _ = step(scheduler, mock)
    assert chunks(output) == [("a", 11, 1), ("b", 31, 19), ("c", 0, 8)]
    assert [s.is_sampled for s in output.sequences] == [True, True, True]


def test_a_one_token_prompt_counts_as_a_decode():
    scheduler, _ = build()
    scheduler.add_request(make_request("long", [1] * 20))
    scheduler.add_request(make_request("one", [2]))
    output = scheduler.schedule()
    assert chunks(output) == [("one", 0, 1), ("long", 0, 20)]
    assert output.num_decodes == 1


def test_max_prefill_chunk_bounds_one_request():
    scheduler, mock = build(max_prefill_chunk=16)
    scheduler.add_request(make_request("a", [1] * 40))
    scheduler.add_request(make_request("b", [2] * 5))
    assert chunks(step(scheduler, mock)[0]) == [("a", 0, 16), ("b", 0, 5)]


def test_eos_stop_ids_length_and_min_tokens():
    from tests.scheduler.paged_mock import rules

    request = make_request("a", [1], 3)
    request.max_num_tokens = 4
    assert request.append_tokens([5]) is None
    assert request.append_tokens([5]) is None
    assert request.append_tokens([5]) is RequestStatus.FINISHED_LENGTH

    def new_request(**fields):
        from engine.request import Request

        return Request("r", [1], rules(**fields), eos_token_ids=[0])

    assert new_request().append_tokens([0]) is RequestStatus.FINISHED_STOPPED
    assert new_request(ignore_eos=True).append_tokens([0]) is None
    assert new_request(min_tokens=2).append_tokens([0]) is None
    stopped = new_request(stop_token_ids=[4])
    assert stopped.append_tokens([4]) is RequestStatus.FINISHED_STOPPED
    assert stopped.stop_reason == 4


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prefix_caching": False},
        {"max_num_batched_tokens": 9, "max_num_seqs": 9},
        {"num_host_blocks": 6},
        {"num_host_blocks": 6, "preemption": "swap"},
        {"policy": "lpm"},
        {"max_blocks_per_salt": 2},
    ],
    ids=str,
)
def test_each_output_equals_the_requests_output_alone(options, block_size, late):
    rng = random.Random(block_size)
    scheduler, mock = build(
        num_blocks=6, max_model_len=1024, block_size=block_size, watermark=0.0, **options
    )
    prefix = [rng.randrange(7) for _ in range(2 * block_size)]
    requests = []
    for number in range(24):
        shared = prefix[: rng.randrange(2 * block_size)]
        prompt = shared + [rng.randrange(7) for _ in range(rng.randrange(1, block_size))]
        requests.append(
            make_request(
                f"r{number}",
                prompt,
                rng.randrange(1, 3 * block_size),
                ignore_eos=rng.random() < 0.8,
                priority=rng.choice([0, 0, 1]),
                cache_salt=rng.choice([None, "a"]),
                short_rope_len=rng.choice([0, 0, 0, block_size + 5]),
            )
        )
        scheduler.add_request(requests[-1])
    drive(scheduler, mock, late=late)
    for request in requests:
        assert request.output_token_ids == oracle(request), request.request_id
    stats = scheduler.stats()
    assert stats.num_free_blocks + stats.num_cached_blocks == 6
    assert stats.num_preemptions > 0
    if options.get("preemption") == "swap":
        assert stats.num_swaps > 0
    scheduler.reset_prefix_cache()
    stats = scheduler.stats()
    assert stats.num_free_blocks == 6
    assert stats.num_free_host_blocks == stats.num_host_blocks


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_host_blocks": 9},
        {"num_host_blocks": 5, "preemption": "swap", "policy": "lpm", "max_blocks_per_salt": 2},
        {"prefix_caching": False, "max_prefill_chunk": 5, "priority_window": 0},
    ],
    ids=str,
)
def test_the_same_arrivals_give_the_same_steps(options, late):
    def run():
        scheduler, mock = build(num_blocks=8, watermark=0.0, **options)
        seen, in_flight = [], []
        for number in range(12):
            prompt, fields = [number % 7] * (7 * number + 1), {"priority": number % 3 - 1}
            salt = "a" if number % 4 == 0 else None
            scheduler.add_request(make_request(f"r{number}", prompt, 20, cache_salt=salt, **fields))
        while scheduler.has_unfinished_requests():
            output = scheduler.schedule()
            if not output.is_empty:
                in_flight.append((output, mock.run(output)))
            tables = [tuple(s.request.block_table) for s in output.sequences]
            moves = output.copies, output.swap_out, output.swap_in
            seen.append((chunks(output), tables, moves, [r.request_id for r in output.preempted]))
            if in_flight and (len(in_flight) > late or output.is_empty):
                scheduler.commit(*in_flight.pop(0))
        assert scheduler.stats().num_preemptions > 0
        return seen

    assert run() == run()


def test_an_unchanged_batch_is_the_previous_one_advanced_by_a_token():
    scheduler, mock = build(num_blocks=64)
    requests = [make_request(f"r{number}", [number] * (10 + number), 30) for number in range(3)]
    for request in requests:
        scheduler.add_request(request)

    def run(count):
        return [step(scheduler, mock)[0].is_unchanged for _ in range(count)]

    assert run(5) == [
        False,
        False,
        True,
        True,
        True,
    ]  # prompts, first decodes, unchanged
    scheduler.add_request(make_request("new", [5, 6], 30))
    assert run(4) == [False, False, True, True]
    scheduler.finish_request(requests[1], "abort")
    assert run(3) == [False, True, True]
    output = scheduler.schedule()
    assert output.is_unchanged
    scheduler.rollback(output)
    assert run(3) == [False, False, True]
    scheduler.commit(output := scheduler.schedule([requests[0]]), mock.run(output))
    assert not output.is_unchanged and run(2) == [False, True]


def test_an_excluded_request_stays_in_its_queue():
    scheduler, mock = build(num_blocks=64, max_num_seqs=2)
    requests = [make_request(f"r{number}", [number] * 10, 6) for number in range(4)]
    for request in requests[:3]:
        scheduler.add_request(request)
    output = scheduler.schedule(excluded={requests[0]})
    assert chunks(output) == [("r1", 0, 10), ("r2", 0, 10)]
    scheduler.commit(output, mock.run(output))
    scheduler.add_request(requests[3])
    output = scheduler.schedule(excluded={requests[1]})  # it runs, and keeps its blocks
    assert chunks(output) == [("r2", 10, 1)] and requests[1].block_table
    scheduler.commit(output, mock.run(output))
    assert scheduler.schedule(excluded=set(requests)).is_empty
    drive(scheduler, mock)
    assert all(request.output_token_ids == oracle(request) for request in requests)


def test_the_last_in_order_is_preempted_and_resumes_from_its_own_prefix():
    scheduler, mock = build(num_blocks=6, watermark=0.0)
    first = make_request("first", [1] * 32, 20)
    last = make_request("last", [2] * 33, 20)
    scheduler.add_request(first)
    scheduler.add_request(last)
    while not last.num_preemptions:
        output, _ = step(scheduler, mock)
    assert output.preempted == [last] and first.num_preemptions == 0
    assert last.status is RequestStatus.PREEMPTED and last.block_table == []
    drive(scheduler, mock)
    assert first.output_token_ids == oracle(first)
    assert last.output_token_ids == oracle(last)
    assert last.num_cached_tokens == 0  # of its first admission
    assert scheduler.stats().prefix_cache_hits > 0


def test_tokens_that_a_failed_step_makes_it_find_again_were_not_cached():
    scheduler, mock = build()
    request = make_request("r", [1] * 40, 20)
    scheduler.add_request(request)
    for _ in range(5):
        step(scheduler, mock)
    scheduler.rollback(scheduler.schedule())
    drive(scheduler, mock)
    assert request.output_token_ids == oracle(request)
    assert scheduler.stats().prefix_cache_hits == 32 and request.num_cached_tokens == 0


def test_only_tokens_of_the_prompt_count_as_cached():
    """A request moved from another engine also finds blocks of its output."""
    scheduler, mock = build()
    first = make_request("first", [1] * 20, 50)
    scheduler.add_request(first)
    drive(scheduler, mock)
    moved = make_request("moved", [1] * 20, 50)
    moved.output_token_ids = first.output_token_ids[:40]
    scheduler.add_request(moved, is_resumed=True)
    drive(scheduler, mock)
    assert moved.output_token_ids == first.output_token_ids
    assert scheduler.stats().prefix_cache_hits == 48 and moved.num_cached_tokens == 20


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
@pytest.mark.parametrize("num_slots", [1, 2])
def test_a_request_gets_a_slot_for_its_adapter(policy, num_slots):
    """However many requests of the adapters that have one arrive behind it."""
    adapters = [SimpleNamespace(serial=1 + index) for index in range(num_slots + 1)]
    scheduler, mock = build(num_blocks=200, max_adapters=num_slots, policy=policy)
    late = make_request("late", [2] * 5, 4, adapter=adapters[-1])
    others = []
    while not late.output_token_ids:
        index = len(others)
        others.append(make_request(str(index), [1] * 6, 4, adapter=adapters[index % num_slots]))
        scheduler.add_request(others[-1])
        if index == 3:
            scheduler.add_request(late)
        output, _ = step(scheduler, mock)
        serials = {s.request.adapter.serial for s in output.sequences}
        assert len(serials) <= num_slots and len(others) < 60
    drive(scheduler, mock)
    assert all(each.output_token_ids == oracle(each) for each in (late, *others))


def test_swap_is_chosen_by_cost():
    def swaps(**costs):
        scheduler, mock = build(num_blocks=6, num_host_blocks=8, watermark=0.0, **costs)
        scheduler.add_request(make_request("a", [1] * 32, 60))
        scheduler.add_request(make_request("b", [2] * 33, 40))
        drive(scheduler, mock)
        stats = scheduler.stats()
        assert stats.num_preemptions > 0
        return stats.num_swaps

    assert swaps(recompute_us_per_token=1000.0, swap_us_per_block=1.0) > 0
    assert swaps(recompute_us_per_token=1.0, swap_us_per_block=1000.0) == 0


def test_evicted_prefixes_come_back_from_the_host():
    scheduler, mock = build(num_blocks=4, num_host_blocks=16, max_model_len=64)
    for prompt in ([1] * 50, [2] * 50, [1] * 50):
        request = make_request(f"r{prompt[0]}", prompt, 2)
        scheduler.add_request(request)
        drive(scheduler, mock)
        assert request.output_token_ids == oracle(request)
    assert request.num_cached_tokens == 48
    stats = scheduler.stats()
    assert stats.prefix_cache_host_hits > 0 and stats.num_offloaded_blocks > 0


def test_a_cached_prompt_leaves_one_token_to_compute():
    scheduler, mock = build()
    for name in ("a", "b"):
        request = make_request(name, [1] * 32, 1)
        scheduler.add_request(request)
        drive(scheduler, mock)
    assert request.num_cached_tokens == 16
    full = make_request("c", [1] * 33, 1)
    scheduler.add_request(full)
    assert chunks(scheduler.schedule()) == [("c", 32, 1)]


def test_salts_and_rope_kinds_do_not_share():
    scheduler, mock = build()
    kinds = [{}, {"cache_salt": "x"}, {"short_rope_len": 30}, {"reuse_prefix": False}]
    for number, fields in enumerate([{}, *kinds]):
        request = make_request(f"r{number}", [1] * 40, 1, **fields)
        scheduler.add_request(request)
        drive(scheduler, mock)
        assert request.num_cached_tokens == (32 if number == 1 else 0)


def test_many_requests_share_one_prefix_while_they_run():
    scheduler, mock = build(num_blocks=20, max_num_batched_tokens=512, max_num_seqs=32)
    prefix = [3] * 160  # ten blocks
    scheduler.add_request(make_request("first", prefix, 20))
    step(scheduler, mock)
    for number in range(8):
        scheduler.add_request(make_request(f"r{number}", [*prefix, number % 7], 5))
    output, _ = step(scheduler, mock)
    assert len(output.admitted) == 8
    assert scheduler.stats().prefix_cache_hits == 8 * 160
    drive(scheduler, mock)


@pytest.mark.parametrize("late", [0, 1])
def test_requests_with_a_common_prefix_wait_for_the_first_to_compute_it(late):
    scheduler, mock = build(num_blocks=64, max_num_batched_tokens=128, max_num_seqs=32)
    requests = [make_request(f"r{i}", [3] * 160 + [i % 7], 4) for i in range(6)]
    other = make_request("other", [4] * 20, 4)
    for request in [*requests, other]:
        scheduler.add_request(request)
    output = scheduler.schedule()
    assert chunks(output) == [("r0", 0, 128)]
    scheduler.commit(output, mock.run(output))
    output = scheduler.schedule()
    assert chunks(output) == [("r0", 128, 33), ("other", 0, 20)]
    scheduler.commit(output, mock.run(output))
    assert len(scheduler.schedule().admitted) == 5
    scheduler.rollback(scheduler._in_flight[-1])
    drive(scheduler, mock, late=late)
    assert all(r.output_token_ids == oracle(r) for r in [*requests, other])


def test_requests_do_not_wait_for_a_short_common_prefix():
    scheduler, _ = build(num_blocks=64, max_num_batched_tokens=512)
    for number in range(4):
        scheduler.add_request(make_request(f"r{number}", [3] * 16 + [number] * 40, 4))
    assert len(scheduler.schedule().admitted) == 4


def test_siblings_share_the_prompt_and_copy_on_write():
    scheduler, mock = build()
    samples = [make_request(f"s{i}", [1] * 20, 6, ignore_eos=True) for i in range(4)]
    scheduler.add_request(samples[0], siblings=samples[1:])
    assert (scheduler.num_waiting, scheduler.num_running) == (4, 0)
    output, _ = step(scheduler, mock)
    assert chunks(output) == [("s0", 0, 20)]
    output, _ = step(scheduler, mock)
    assert len(output.sequences) == 4 and output.num_decodes == 4
    assert len(output.copies) == 3  # the last owner of the partial block keeps it
    assert len({s.request.block_table[0] for s in output.sequences}) == 1
    assert len({s.request.block_table[1] for s in output.sequences}) == 4
    drive(scheduler, mock)
    for request in samples:
        assert request.output_token_ids == oracle(request)
        assert request.num_cached_tokens == (0 if request is samples[0] else 19)


def test_siblings_outlive_their_leader():
    scheduler, mock = build(max_num_batched_tokens=8)
    samples = [make_request(f"s{i}", [1] * 20, 3) for i in range(3)]
    scheduler.add_request(samples[0], siblings=samples[1:])
    step(scheduler, mock)
    scheduler.finish_request(samples[0], "abort")
    scheduler.finish_request(samples[2], "abort")
    drive(scheduler, mock)
    assert samples[1].output_token_ids == oracle(samples[1])
    assert samples[2].output_token_ids == []


def test_a_fork_continues_on_its_parents_blocks():
    scheduler, mock = build()
    parent = make_request("p", [1] * 30, 20)
    scheduler.add_request(parent)
    for _ in range(4):
        step(scheduler, mock)
    child = make_request("c", [1] * 30, 20)
    child.output_token_ids = [*parent.output_token_ids[:2], 6]
    scheduler.fork_request(parent, child)
    assert child.status is RequestStatus.RUNNING and child.num_cached_tokens == 30
    drive(scheduler, mock)
    assert child.output_token_ids == oracle(child, num_outputs=3)
    assert parent.output_token_ids == oracle(parent)
    stranger = make_request("x", [2] * 30, 20)
    other = make_request("y", [1] * 30, 20)
    scheduler.add_request(other)
    step(scheduler, mock)
    with pytest.raises(RequestError, match="must agree with its parent"):
        scheduler.fork_request(other, stranger)
    assert stranger not in scheduler.unfinished_requests()


def test_priority_overtakes_but_never_starves():
    scheduler, mock = build(max_num_seqs=1, priority_window=4)
    low = make_request("low", [1], 1, priority=1)
    scheduler.add_request(low)
    served = []
    for number in range(10):
        scheduler.add_request(make_request(f"h{number}", [2], 1))
        served += [r.request_id for r in step(scheduler, mock)[1]]
    assert served.index("low") == 3  # after h0 to h2; h3 has the same rank, and came later


def test_priority_window_zero_is_first_come_first_served():
    scheduler, mock = build(max_num_seqs=1, priority_window=0)
    scheduler.add_request(make_request("a", [1], 1, priority=5))
    scheduler.add_request(make_request("b", [1], 1, priority=-5))
    assert [r.request_id for r in step(scheduler, mock)[1]] == ["a"]


def test_lpm_prefers_cached_prefixes_and_never_starves():
    scheduler, mock = build(policy="lpm", lpm_window=4, max_num_seqs=1)
    scheduler.add_request(make_request("warm", [1] * 64, 1))
    step(scheduler, mock)
    drive(scheduler, mock)
    scheduler.add_request(make_request("cold", [2] * 40, 1))
    served = []
    for number in range(8):
        scheduler.add_request(make_request(f"h{number}", [1] * 40 + [number % 7], 1))
        served += [r.request_id for r in step(scheduler, mock)[1]]
    assert served[0] == "h0" and served.index("cold") == 4


def test_a_request_that_can_never_be_served_is_rejected_when_added():
    scheduler, _ = build(num_blocks=2, max_model_len=64)
    with pytest.raises(RequestError, match=r"1 to 63 tokens.*got 0"):
        scheduler.add_request(make_request("a", []))
    with pytest.raises(ContextLengthError, match=r"64 tokens.*at most 63 tokens"):
        scheduler.add_request(make_request("a", [1] * 64))
    with pytest.raises(RequestError, match=r"need 3 KV blocks of 16 tokens.*only 2"):
        scheduler.add_request(make_request("a", [1] * 30, 4))
    scheduler.add_request(make_request("a", [1] * 30, 3))
    with pytest.raises(RequestError, match="'a' is in use"):
        scheduler.add_request(make_request("a", [1]))
    with pytest.raises(RequestError, match="must have the prompt, salt and rope"):
        scheduler.add_request(make_request("b", [1]), siblings=[make_request("c", [2])])
    with pytest.raises(RequestError, match="must have different ids"):
        scheduler.add_request(make_request("b", [1]), siblings=[make_request("b", [1])])
    with pytest.raises(RequestError, match="priority"):
        scheduler.add_request(make_request("b", [1], priority=2**40))
    assert scheduler.num_waiting == 1


def test_a_full_queue_rejects_requests():
    scheduler, mock = build(max_num_queued_requests=2, max_num_queued_tokens=30)
    scheduler.add_request(make_request("long", [1] * 100))  # an empty queue accepts any length
    with pytest.raises(QueueFullError, match=r"100 tokens wait, 5 more.*max_num_queued_tokens=30"):
        scheduler.add_request(make_request("a", [1] * 5))
    step(scheduler, mock)
    scheduler.add_request(make_request("a", [1] * 5))
    scheduler.add_request(make_request("b", [1] * 5))
    with pytest.raises(QueueFullError, match=r"2 requests wait, 1 more.*max_num_queued_requests=2"):
        scheduler.add_request(make_request("c", [1] * 5))
    drive(scheduler, mock)


def test_a_full_queue_rejects_forks_that_would_wait():
    scheduler, mock = build(max_num_seqs=2, max_num_queued_requests=1)
    parent = make_request("p", [1] * 5, 20)
    scheduler.add_request(parent)
    step(scheduler, mock)
    prompt = [*[1] * 5, *parent.output_token_ids]

    def fork(name, **options):
        scheduler.fork_request(parent, make_request(name, [*prompt, 6], 2), **options)

    fork("runs at once")
    fork("waits")
    with pytest.raises(QueueFullError, match=r"1 requests wait, 1 more.*max_num_queued_requests=1"):
        fork("refused")
    fork("accepted before", is_resumed=True)
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 2)
    drive(scheduler, mock)


def test_abort_in_every_state_frees_everything_and_is_idempotent():
    scheduler, mock = build(num_blocks=6, num_host_blocks=6, preemption="swap", watermark=0.0)
    requests = [make_request(f"r{i}", [i] * 30, 40) for i in range(4)]
    for request in requests:
        scheduler.add_request(request)
    states = set()
    for turn in itertools.count():
        if not scheduler.has_unfinished_requests():
            break
        output = scheduler.schedule()
        ids = mock.run(output)
        if turn % 7 == 6:
            victim = list(scheduler.unfinished_requests())[-1 if turn % 2 else 0]
            states.add(victim.status)
            for _ in range(2):  # the second time nothing happens
                scheduler.finish_request(victim, "abort")
                assert victim not in scheduler.unfinished_requests()
            assert victim.finish_reason == "abort"
        scheduler.commit(output, ids)
    assert len(states) > 1
    stats = scheduler.stats()
    assert stats.num_free_blocks + stats.num_cached_blocks == 6
    scheduler.reset_prefix_cache()
    assert scheduler.stats().num_free_host_blocks == 6


def test_finish_request():
    scheduler, mock = build()
    request = make_request("a", [1] * 5)
    scheduler.add_request(request)
    step(scheduler, mock)
    with pytest.raises(ContractError, match="reason must be one of"):
        scheduler.finish_request(request, "bored")
    scheduler.finish_request(request, "stop", stop_reason="###")
    scheduler.finish_request(request, "error")
    assert (request.finish_reason, request.stop_reason) == ("stop", "###")
    assert not scheduler.has_unfinished_requests()


@pytest.mark.parametrize("late", [0, 1])
def test_a_failed_step_is_recomputed(late):
    options = {"num_blocks": 8, "num_host_blocks": 4, "watermark": 0.0, "preemption": "swap"}
    scheduler, mock = build(**options)
    requests = [make_request(f"r{i}", [1] * 16 + [i] * 20, 30) for i in range(5)]
    for request in requests:
        scheduler.add_request(request)
    in_flight = []
    for turn in itertools.count():
        if not scheduler.has_unfinished_requests():
            break
        output = scheduler.schedule()
        if turn % 11 == 10 and not output.is_empty:  # the step fails before it has run
            scheduler.rollback(output)
            while in_flight:  # steps before it are rolled back too, though they ran
                scheduler.rollback(in_flight.pop()[0])
            scheduler.check_integrity()
            continue
        if not output.is_empty:
            in_flight.append((output, mock.run(output)))
        if in_flight and (len(in_flight) > late or output.is_empty):
            scheduler.commit(*in_flight.pop(0))
    for request in requests:
        assert request.output_token_ids == oracle(request)
    assert scheduler.stats().num_retries > 0


def test_a_prefill_never_takes_the_blocks_of_a_request_scheduled_before_it():
    scheduler, mock = build(
        num_blocks=6, max_num_batched_tokens=12, max_prefill_chunk=4, watermark=0.0
    )
    parent, decode = make_request("parent", [1] * 60, 4), make_request("decode", [2] * 4, 8)
    scheduler.add_request(parent)
    scheduler.add_request(decode)
    step(scheduler, mock)
    child = make_request("child", [1] * 60, 4)
    scheduler.fork_request(parent, child)  # needs 3 blocks of its own, but only one is free
    output, _ = step(scheduler, mock)
    assert chunks(output) == [("decode", 4, 1), ("parent", 4, 4)]
    assert output.preempted == [] and child.status is RequestStatus.RUNNING
    drive(scheduler, mock)
    assert all(r.output_token_ids == oracle(r) for r in (parent, child, decode))


@pytest.mark.parametrize("way", ["abort", "fork"])
def test_uncommitted_tokens_are_not_shared(way):
    """A rolled-back step leaves no trace, whatever was aborted or forked while it was in flight."""
    scheduler, mock = build()
    request = make_request("a", [1] * 15, 20)
    scheduler.add_request(request)
    first = scheduler.schedule()
    batch = mock.lay_out(first)
    second = scheduler.schedule()  # computes position 15, the last slot of the block
    scheduler.commit(first, mock.execute(first, batch))
    known = [*request.prompt_token_ids, *request.output_token_ids]
    assert (request.num_committed_tokens, request.num_computed_tokens) == (15, 16)
    if way == "fork":
        child = make_request("child", [1] * 15, 20)
        child.output_token_ids = [known[-1], 3]
        scheduler.fork_request(request, child)
    else:
        scheduler.finish_request(request, "abort")
        child = make_request("child", [*known, 3], 20)
        scheduler.add_request(child)
    scheduler.rollback(second)
    drive(scheduler, mock)
    assert child.output_token_ids == oracle(child, 2 if way == "fork" else 0)


def test_a_request_with_a_pending_token_is_not_admitted():
    """A request preempted with two steps in flight waits until its last id is known."""
    for length in range(1, 40):
        scheduler, mock = build(num_blocks=6, watermark=0.0)
        requests = [make_request("a", [1] * 16, length), make_request("b", [2] * 32, 20)]
        requests.append(make_request("c", [3] * 16, 30))
        for request in requests:
            scheduler.add_request(request)
        drive(scheduler, mock, late=2)
        assert all(request.output_token_ids == oracle(request) for request in requests)


def test_a_retry_is_a_restart_but_no_preemption():
    """Whoever keeps something of its blocks must look again: others may have had them."""
    scheduler, mock = build()
    request = make_request("a", [1] * 20, 6)
    scheduler.add_request(request)
    step(scheduler, mock)
    step(scheduler, mock)
    assert request.num_restarts == 0
    scheduler.rollback(scheduler.schedule())
    assert request.num_restarts == 1 and request.num_preemptions == 0
    drive(scheduler, mock)
    assert request.output_token_ids == oracle(request)


def test_steps_are_settled_in_order():
    scheduler, mock = build()
    scheduler.add_request(make_request("a", [1] * 5))
    first = scheduler.schedule()
    batch = mock.lay_out(first)
    second = scheduler.schedule()
    assert second.sequences[0].num_pending_tokens == 1
    with pytest.raises(ContractError, match="step 0 comes first"):
        scheduler.commit(second, {})
    with pytest.raises(ContractError, match="step 1 comes first"):
        scheduler.rollback(first)
    scheduler.commit(first, mock.execute(first, batch))
    with pytest.raises(ContractError, match="no token was sampled for request 'a'"):
        scheduler.commit(second, {})


def test_ten_thousand_requests_leak_nothing():
    scheduler, mock = build(num_blocks=16, debug=False, max_num_batched_tokens=256)
    for number in range(10_000):
        scheduler.add_request(make_request(f"r{number}", [number % 7, number % 5] * 9, 1))
        if number % 8 == 7:
            drive(scheduler, mock)
    tree = scheduler.blocks.tree
    assert tree.num_nodes <= 16 and len(tree._device_lru) <= 2 * 16 + 64
    assert len(scheduler._queues.waiting._heap) <= 64
    scheduler.check_integrity()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_blocks", 0),
        ("block_size", 8),
        ("watermark", 1.5),
        ("watermark", float("nan")),
        ("policy", "random"),
        ("preemption", "never"),
        ("preemption", "swap"),
        ("max_num_batched_tokens", 4),
        ("max_num_queued_requests", 0),
        ("num_host_blocks", -1),
    ],
)
def test_bad_config(field, value):
    options = {"num_blocks": 8, "max_model_len": 64, "max_num_seqs": 8, field: value}
    with pytest.raises(ConfigError, match=field):
        SchedulerConfig(**options)
