"""Random operations of a scheduler of a model with recurrent layers, with many forks and swaps."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from engine.errors import RequestError
from engine.request import RequestStatus
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.scheduler import Scheduler
from tests.scheduler.paged_mock import PagedMock, drive, make_request, oracle

_VOCAB = 7


class _Load:
    """Operations on one scheduler; `counts` tells what they reached."""

    def __init__(self, seed, counts):
        self.rng = rng = random.Random(seed)
        self.counts = counts
        seqs = rng.choice([2, 5, 8])
        self.config = SchedulerConfig(
            num_blocks=rng.choice([8, 14, 30]),
            max_model_len=160,
            max_num_seqs=seqs,
            max_num_batched_tokens=rng.choice([seqs, 20, 64]),
            num_host_blocks=12,
            num_state_slots=seqs + rng.choice([0, 1, 3, 12]),
            num_host_state_slots=rng.choice([1, 4]),
            state_chunk=16,
            state_interval=rng.choice([0, 32]),
            prefix_caching=rng.random() < 0.8,
            max_draft_tokens=5,
            preemption=rng.choice(["swap", "auto", "recompute"]),
            watermark=0.0,
            debug=True,
        )
        self.scheduler = Scheduler(self.config)
        self.mock = PagedMock(self.config)
        self.given = {}  # request -> output tokens it was added with
        self.in_flight = []

    def add(self):
        rng = self.rng
        stem = [rng.randrange(2)] * rng.choice([0, 16, 40, 55])
        ids = [*stem, *(rng.randrange(_VOCAB) for _ in range(rng.randint(1, 9)))]
        request = make_request(f"r{len(self.given)}", ids, rng.choice([3, 30, 60]))
        siblings = [
            make_request(f"{request.request_id}-{i}", ids, 20) for i in range(rng.choice([0, 0, 2]))
        ]
        try:
            self.scheduler.add_request(request, siblings)
        except RequestError:  # it can never fit
            return
        self.given.update(dict.fromkeys([request, *siblings], 0))

    def fork(self):
        """Continue from all that a request has computed, with another last token."""
        found = [r for r in self.scheduler.unfinished_requests() if r.output_token_ids]
        if not found:
            return
        parent = self.rng.choice(found)
        kept = parent.num_output_tokens - 1
        child = make_request(f"r{len(self.given)}", parent.prompt_token_ids, 60)
        child.output_token_ids = [*parent.output_token_ids[:kept], self.rng.randrange(_VOCAB)]
        try:
            self.scheduler.fork_request(parent, child)
        except RequestError:
            return
        self.given[child] = kept + 1

    def propose(self):
        for request in list(self.scheduler.unfinished_requests()):
            start = request.num_tokens - request.num_prompt_tokens
            ids = oracle(request, self.given[request])[start : start + 5]
            ids[self.rng.randrange(6) :] = [1]
            self.scheduler.propose(request, ids[:5])

    def step(self):
        self.dispatch(self.scheduler.schedule())
        while len(self.in_flight) > self.rng.randrange(3):
            self.commit()

    def dispatch(self, output):
        if not output.is_empty:
            self.in_flight.append((output, self.mock.lay_out(output)))

    def commit(self):
        output, batch = self.in_flight.pop(0)
        self.scheduler.commit(output, self.mock.execute(output, batch))

    def commit_all(self):
        while self.in_flight:
            self.commit()

    def preempt(self):
        """Preempt the last running request in a step, without need."""
        queues = self.scheduler._queues
        if not queues.running or len(self.in_flight) > 1:
            return
        can_swap = self.scheduler.blocks.can_swap_out(queues.running[-1])
        last = queues.preempt_last(swap=can_swap)
        self.counts["swaps"] += can_swap
        output = self.scheduler.schedule({last})
        output.preempted.append(last)
        self.dispatch(output)

    def abort(self):
        if unfinished := list(self.scheduler.unfinished_requests()):
            self.scheduler.finish_request(self.rng.choice(unfinished), "abort")

    def fail(self):
        self.dispatch(self.scheduler.schedule())
        for output, batch in self.in_flight[: self.rng.randrange(3)]:
            self.mock.execute(output, batch)
        while self.in_flight:
            self.scheduler.rollback(self.in_flight.pop()[0])

    def run(self):
        actions = [self.step] * 12 + [self.add, self.commit_all] * 2 + [self.fork] * 4
        actions += [self.propose] * 2 + [self.preempt, self.abort, self.fail]
        for _ in range(150):
            self.rng.choice(actions)()
            self.scheduler.check_integrity()
        self.commit_all()
        drive(self.scheduler, self.mock, late=self.rng.randrange(2))

    def check(self):
        for request, count in self.given.items():
            want = oracle(request, count)
            assert request.output_token_ids == want[: request.num_output_tokens]
            if request.status is RequestStatus.FINISHED_LENGTH:
                assert request.output_token_ids == want
        self.scheduler.reset_prefix_cache()
        states = self.scheduler.blocks.states
        assert states.allocator.num_free == self.config.num_state_slots
        assert states.host_allocator.num_free == self.config.num_host_state_slots
        self.counts["forks"] += self.mock.num_slot_copies
        self.counts["snapshots"] += self.mock.num_snapshot_hits
        self.counts["drafts"] += self.mock.num_accepted


@pytest.mark.parametrize("part", range(3))
def test_random_operations(part):
    counts = Counter()
    for seed in range(8 * part, 8 * part + 8):
        load = _Load(seed, counts)
        load.run()
        load.check()
    assert min(counts[name] for name in ("forks", "swaps", "snapshots", "drafts")) > 2, counts
