"""A state machine that searches for a sequence of calls that breaks the scheduler.

After every rule all invariants are checked, and every output so far must be a prefix of the output
that the request has on its own. `ENGINE_TEST_EXAMPLES=2000` searches deeper than the default.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.errors import RequestError
from engine.request import RequestStatus
from engine.scheduler.admission import QueueFullError
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.scheduler import Scheduler
from tests.scheduler.paged_mock import VOCAB, PagedMock, drive, make_request, oracle

EXAMPLES = int(os.environ.get("ENGINE_TEST_EXAMPLES", "60"))

states = st.fixed_dictionaries(
    {
        "num_host_state_slots": st.sampled_from([0, 1, 4]),
        "state_interval": st.sampled_from([0, 16, 32]),
        "state_chunk": st.just(16),
    }
)


def build_config(max_num_seqs, states, extra_slots, **limits):
    """A configuration of a model with recurrent layers, or without (`states` is None)."""
    if states is not None:
        limits |= {**states, "num_state_slots": max_num_seqs + extra_slots}
    return SchedulerConfig(max_num_seqs=max_num_seqs, **limits)


configs = st.builds(
    build_config,
    states=st.one_of(st.none(), states),
    extra_slots=st.integers(0, 9),
    num_blocks=st.integers(3, 8),
    max_model_len=st.just(120),
    max_num_seqs=st.integers(2, 6),
    max_num_batched_tokens=st.sampled_from([6, 17, 64]),
    max_prefill_chunk=st.sampled_from([0, 5]),
    watermark=st.sampled_from([0.0, 0.1]),
    policy=st.sampled_from(["fcfs", "lpm"]),
    lpm_window=st.sampled_from([1, 3]),
    priority_window=st.sampled_from([0, 2]),
    prefix_caching=st.sampled_from([True, True, True, False]),
    max_blocks_per_salt=st.sampled_from([None, 1, 3]),
    num_host_blocks=st.sampled_from([1, 4, 12]),
    preemption=st.sampled_from(["auto", "recompute", "swap"]),
    max_draft_tokens=st.just(20),
    max_num_queued_requests=st.sampled_from([None, 6]),
    max_num_queued_tokens=st.sampled_from([None, 100]),
    debug=st.just(True),
)

# Few, long, similar prompts, whose common prefixes end at block boundaries and between them.
prompts = st.builds(
    lambda head, length, tail: [head] * length + tail,
    st.integers(0, 1),
    st.sampled_from([15, 16, 17, 32, 40, 0]),
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3),
)
fields = st.fixed_dictionaries(
    {
        "max_tokens": st.sampled_from([30, 20, 7, 1]),
        "ignore_eos": st.sampled_from([True, True, False]),
        "priority": st.integers(-1, 1),
        "cache_salt": st.sampled_from([None, None, "a"]),
        "short_rope_len": st.sampled_from([0, 0, 20, 38]),
        "reuse_prefix": st.sampled_from([True, True, False]),
    }
)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(config=configs)
    def start(self, config):
        self.config = config
        self.scheduler = Scheduler(config)
        self.mock = PagedMock(config)
        self.requests = {}  # every request ever added -> output tokens it was added with
        self.in_flight = []
        self.count = 0
        self.num_copies = self.num_restarted = 0

    def new_request(self, prompt, options):
        self.count += 1
        return make_request(f"r{self.count}", prompt, **options)

    def unfinished(self, draw):
        return draw.draw(st.sampled_from(list(self.scheduler.unfinished_requests())))

    @property
    def has_requests(self):
        return self.scheduler.has_unfinished_requests()

    @rule(
        arrivals=st.lists(st.tuples(prompts, fields, st.sampled_from([0, 0, 0, 1, 3])), min_size=1)
    )
    def add_some(self, arrivals):
        for arrival in arrivals[:6]:
            self.add(*arrival)

    def add(self, prompt, options, num_siblings):
        group = [self.new_request(prompt, options) for _ in range(1 + num_siblings)]
        try:
            self.scheduler.add_request(group[0], siblings=group[1:])
        except QueueFullError:
            return
        except RequestError:
            longest = min(len(prompt) + options["max_tokens"], self.config.max_model_len)
            assert longest - 1 > self.config.num_blocks * self.config.block_size
            return
        self.requests.update((request, 0) for request in group)

    @rule(
        turns=st.sampled_from([25, 10, 3]),
        length=st.sampled_from([0, 0, 1, 4, 20]),
        wrong=st.integers(0, 4),
        is_tree=st.booleans(),
    )
    def steps(self, turns, length, wrong, is_tree):
        for turn in range(turns):
            if length:
                for request in self.scheduler.unfinished_requests():
                    self.propose_for(request, length, (wrong + turn) % 5, is_tree=is_tree)
            self.dispatch()
            self.commit_all()

    @rule()
    @precondition(lambda self: len(self.in_flight) < 3)
    def dispatch(self):
        """Schedule a step and lay it out; it runs, and is committed, by another rule."""
        had_requests = self.has_requests
        output = self.scheduler.schedule()
        self.num_copies += len(output.copies)
        self.num_restarted += len(output.restarted)
        if not output.is_empty:
            self.in_flight.append((output, self.mock.lay_out(output)))
        elif had_requests:
            assert self.in_flight, "requests, but no progress"

    @rule(draw=st.data())
    @precondition(lambda self: len(self.in_flight) < 3 and self.has_requests)
    def dispatch_some(self, draw):
        unfinished = list(self.scheduler.unfinished_requests())
        self.dispatch_without(draw.draw(st.sets(st.sampled_from(unfinished))))

    def dispatch_without(self, excluded):
        """Schedule a step that excludes some requests."""
        output = self.scheduler.schedule(excluded)
        scheduled = {s.request for s in output.sequences} | set(output.admitted)
        assert not excluded & scheduled
        self.num_copies += len(output.copies)
        if not output.is_empty:
            self.in_flight.append((output, self.mock.lay_out(output)))

    @rule()
    def commit_one(self):
        if self.in_flight:
            output, batch = self.in_flight.pop(0)
            self.scheduler.commit(output, self.mock.execute(output, batch))

    @rule()
    def commit_all(self):
        while self.in_flight:
            self.commit_one()

    @rule(num_run=st.integers(0, 4))
    def fail(self, num_run):
        """Roll back all steps in flight, after the first `num_run` of them have run."""
        output = self.scheduler.schedule()
        if not output.is_empty:
            self.in_flight.append((output, self.mock.lay_out(output)))
        for output, batch in self.in_flight[:num_run]:
            self.mock.execute(output, batch)
        while self.in_flight:
            self.scheduler.rollback(self.in_flight.pop()[0])

    @rule(draw=st.data())
    @precondition(lambda self: self.has_requests)
    def abort(self, draw):
        self.abort_one(self.unfinished(draw))

    def abort_one(self, request):
        for _ in range(2):  # the second time nothing happens
            self.scheduler.finish_request(request, "abort")
            assert request.finish_reason == "abort"

    @rule(draw=st.data(), reason=st.sampled_from(["stop", "error"]))
    @precondition(lambda self: self.has_requests)
    def finish(self, draw, reason):
        self.finish_one(self.unfinished(draw), reason)

    def finish_one(self, request, reason):
        self.scheduler.finish_request(request, reason)
        assert request.finish_reason == reason

    @rule(draw=st.data(), token=st.integers(0, VOCAB - 1), options=fields)
    @precondition(lambda self: self.has_requests)
    def fork(self, draw, token, options):
        parent = self.unfinished(draw)
        computed = max(0, parent.num_output_tokens - 1)  # what is shared without a rollback
        kept = draw.draw(st.one_of(st.just(computed), st.integers(0, parent.num_output_tokens)))
        self.fork_one(parent, kept, token, options)

    def fork_one(self, parent, kept, token, options):
        options.update(cache_salt=parent.cache_salt, short_rope_len=parent.short_rope_len)
        child = self.new_request(parent.prompt_token_ids, options)
        child.output_token_ids = [*parent.output_token_ids[:kept], token]
        try:
            self.scheduler.fork_request(parent, child)
        except RequestError:
            return
        self.requests[child] = kept + 1

    @rule(
        draw=st.data(),
        length=st.sampled_from([1, 3, 20]),
        wrong=st.integers(0, 20),
        is_tree=st.booleans(),
    )
    @precondition(lambda self: self.requests)
    def propose(self, draw, length, wrong, is_tree):
        for request in draw.draw(st.sets(st.sampled_from(list(self.requests)), min_size=1)):
            self.propose_for(request, length, wrong, is_tree=is_tree)

    def propose_for(self, request, length, wrong, *, is_tree):
        """Propose tokens, wrong ones from index `wrong` on, or a tree of right and wrong ones."""
        start = request.num_tokens - request.num_prompt_tokens
        ids = [*oracle(request, self.requests[request])[start:], *range(length)][:length]
        ids[wrong:] = [(token + 1) % VOCAB for token in ids[wrong:]]
        parents = None
        if is_tree:  # each token has an alternative, before or after it
            order = (1, 0) if wrong % 2 else (0, 1)
            ids = [(token + add) % VOCAB for token in ids for add in order][:20]
            right = order.index(0)
            parents = [-1 if i < 2 else i // 2 * 2 - 2 + right for i in range(len(ids))]
        noted = self.scheduler.propose(request, ids, parents)
        assert not (noted and request.is_finished)

    @rule(count=st.integers(1, 4), on_host=st.booleans())
    def evict(self, count, on_host):
        """Evict blocks from the tree, as an allocation would."""
        tree = self.scheduler.blocks.tree
        if tree is not None:
            (tree.evict_host if on_host else tree.evict)(count)

    @rule(swap=st.booleans())
    @precondition(lambda self: len(self.in_flight) < 3 and self.scheduler.num_running)
    def preempt(self, swap):
        """Schedule a step that preempts the last running request without need."""
        queues, blocks = self.scheduler._queues, self.scheduler.blocks
        last = queues.preempt_last(swap=swap and blocks.can_swap_out(queues.running[-1]))
        output = self.scheduler.schedule({last})
        output.preempted.append(last)
        self.num_copies += len(output.copies)
        if not output.is_empty:
            self.in_flight.append((output, self.mock.lay_out(output)))

    @rule()
    def reset(self):
        self.scheduler.reset_prefix_cache()

    @invariant()
    def holds(self):
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check_integrity()
        for request, given in self.requests.items():
            expected = oracle(request, given)
            assert request.output_token_ids == expected[: request.num_output_tokens]
            if request.status is RequestStatus.FINISHED_LENGTH:
                assert request.output_token_ids == expected

    def teardown(self):
        if hasattr(self, "scheduler"):
            self.drain()
            self.note()

    def drain(self):
        """Serve what is left; nothing must be held then."""
        self.commit_all()
        drive(self.scheduler, self.mock, late=self.count % 2)
        self.holds()
        self.scheduler.reset_prefix_cache()
        states = self.scheduler.blocks.states
        if states is not None:
            assert states.allocator.num_free == self.config.num_state_slots
            assert states.host_allocator is None or states.host_allocator.num_referenced == 0
        stats = self.scheduler.stats()
        assert stats.num_free_blocks == stats.num_blocks
        assert stats.num_free_host_blocks == stats.num_host_blocks
        assert stats.num_requests_waiting == stats.num_requests_running == 0

    def note(self):
        """Tell hypothesis what this example has reached."""
        stats = self.scheduler.stats()
        for name in ("num_preemptions", "num_swaps", "num_retries", "prefix_cache_hits"):
            event(f"{name}: {'some' if getattr(stats, name) else 'none'}")
        event(f"prefix_cache_host_hits: {'some' if stats.prefix_cache_host_hits else 'none'}")
        event(f"copies: {'some' if self.num_copies else 'none'}")
        event(f"rope changes: {'some' if self.num_restarted else 'none'}")
        event(f"accepted drafts: {'some' if self.mock.num_accepted else 'none'}")
        event(f"rejected drafts: {'some' if self.mock.num_rejected else 'none'}")
        event(f"copied states: {'some' if self.mock.num_slot_copies else 'none'}")
        event(f"snapshots: {'read' if self.mock.num_snapshot_hits else 'none'}")
        event(f"unchanged batches: {'some' if self.mock.num_unchanged else 'none'}")


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
