"""The router of replicas: where prompts go, what is forgotten, its bounds; random calls."""

from __future__ import annotations

import itertools
import os
import random
import statistics
import subprocess
import sys
import time

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.errors import EngineError
from engine.server.replicas.router import PrefixRouter, chunk_hashes

EXAMPLES = int(os.environ.get("ENGINE_TEST_EXAMPLES", "40"))
SIZE = 4


def make(num_replicas=2, capacity=1 << 30, **options):
    router = PrefixRouter(**({"chunk_size": SIZE, "request_tokens": 8} | options))
    for number in range(num_replicas):
        router.add_replica(number, capacity)
    return router


def serve(router, ids, salt=None, num_cached=None):
    """Route a prompt, let it be computed, and end it."""
    route = router.route(ids, salt)
    router.computed(route, route.num_cached_tokens if num_cached is None else num_cached)
    router.finished(route)
    router.check_integrity()
    return route


def prompt(seed, length=40):
    return random.Random(seed).choices(range(1000), k=length)


# ---- hashes


def test_a_hash_covers_all_that_is_before_it():
    ids = prompt(1)
    hashes = chunk_hashes(ids, SIZE)
    assert len(hashes) == 10 and len(set(hashes)) == 10
    assert chunk_hashes(ids[:39], SIZE) == hashes[:9]
    for index in range(40):
        changed = chunk_hashes([*ids[:index], ids[index] + 1, *ids[index + 1 :]], SIZE)
        equal = [a == b for a, b in zip(hashes, changed, strict=True)]
        assert equal == [True] * (index // SIZE) + [False] * (10 - index // SIZE)
    assert not set(hashes) & set(chunk_hashes(ids, SIZE, "a salt"))
    assert chunk_hashes(ids, SIZE, "a") != chunk_hashes(ids, SIZE, "b")
    assert chunk_hashes([1, 2, 3], SIZE) == []


def test_another_process_computes_the_same_hashes():
    code = "from engine.server.replicas.router import *; print(chunk_hashes([*range(9)], 4, 'é'))"
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout.strip() == str(chunk_hashes([*range(9)], 4, "é"))


# ---- choices


def test_a_known_prefix_is_followed():
    router = make(5)
    first = serve(router, prompt(1))
    for _ in range(10):
        again = serve(router, [*prompt(1)[:30], *prompt(2)])
        assert again.replica == first.replica and again.num_cached_tokens >= 28


def test_a_whole_prompt_that_is_cached_leaves_its_last_token():
    router = make(1)
    serve(router, prompt(1))
    route = router.route(prompt(1))
    assert (route.num_cached_tokens, route.num_waiting_tokens) == (39, 1)


def test_salts_share_nothing():
    router = make(1)
    serve(router, prompt(1), "a")
    assert router.route(prompt(1), "a").num_cached_tokens == 39
    assert router.route(prompt(1), "b").num_cached_tokens == 0
    assert router.route(prompt(1)).num_cached_tokens == 0


def test_prompts_without_a_common_prefix_are_spread_evenly():
    router = make(8)
    for seed in range(800):
        router.route(prompt(seed))
    assert [router.num_requests(number) for number in range(8)] == [100] * 8
    router.check_integrity()


def test_short_prompts_are_spread_too():
    router = make(4)
    assert sorted(router.route([1]).replica for _ in range(8)) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_prefix_is_left_when_waiting_costs_more():
    """The choice is the smallest sum of what waits and what is not cached."""
    router = make(2)
    home = serve(router, prompt(1, 100)).replica
    chosen = [router.route(prompt(1, 100)).replica for _ in range(14)]
    # Each one counts for 8 tokens and the last one of its prompt; there are 100 to be saved.
    assert chosen[:12] == [home] * 12 and chosen[12] != home
    # From then on both have the prefix.
    assert sorted(chosen[12:]) == [0, 1] or chosen[13] != home


def test_requests_of_others_count():
    router = make(2)
    router.report_load(0, num_waiting_tokens=1000, num_requests=3)
    assert router.load(0) == 1000 + 3 * 8
    assert [router.route(prompt(i)).replica for i in range(20)] == [1] * 20
    router.report_load(0, 0, 0)
    assert router.load(0) == 0 and router.route(prompt(99)).replica == 0
    before = router.load(1)
    router.report_load(1, 20 * 40, 20)  # its own ones, and no others
    assert router.load(1) == before
    router.report_load(7, 1, 1)  # of a replica that is gone
    router.check_integrity()


def test_excluded_replicas_are_not_chosen():
    router = make(3)
    home = serve(router, prompt(1)).replica
    others = {0, 1, 2} - {home}
    assert router.route(prompt(1), excluded={home}).replica in others
    assert router.route(prompt(1), excluded=others).replica == home
    assert router.route(prompt(1), excluded={0, 1, 2}) is None
    assert PrefixRouter().route([1, 2, 3]) is None
    router.check_integrity()


def test_routers_that_do_not_know_each_other_agree_while_nothing_waits():
    for seed in range(50):
        assert make(7).route(prompt(seed)).replica == make(7).route(prompt(seed)).replica
    assert len({make(7).route(prompt(seed)).replica for seed in range(50)}) == 7


# ---- loads


def test_a_request_counts_until_it_has_ended():
    router = make(1)
    route = router.route(prompt(1))
    assert router.load(0) == 40 + 8
    router.computed(route, 0)
    router.computed(route, 0)
    assert router.load(0) == 8
    router.finished(route)
    router.finished(route)
    assert router.load(0) == 0 and router.num_requests(0) == 0
    router.check_integrity()


def test_a_replica_that_is_gone_takes_nothing_and_its_routes_do_no_harm():
    router = make(2)
    route = router.route(prompt(1))
    router.remove_replica(route.replica)
    assert router.num_chunks == 0 and router.replicas == [1 - route.replica]
    router.computed(route, 0)
    router.finished(route)
    router.add_replica(route.replica)  # started again: it is empty
    assert router.load(route.replica) == 0
    assert router.route(prompt(1)).num_cached_tokens == 0
    router.check_integrity()
    with pytest.raises(EngineError, match="new number; got 0"):
        router.add_replica(0)


# ---- forgetting


def test_a_replica_remembers_no_more_than_it_caches():
    router = make(1, capacity=25 * SIZE)
    for seed in range(3):
        serve(router, prompt(seed))
    assert router.num_chunks == 25
    assert router.route(prompt(2)).num_cached_tokens == 39
    assert router.route(prompt(1)).num_cached_tokens == 39
    # Of the oldest one, the end is forgotten first.
    assert 0 < router.route(prompt(0)).num_cached_tokens <= 5 * SIZE


def test_a_prompt_longer_than_the_capacity_keeps_its_beginning():
    router = make(1, capacity=3 * SIZE)
    serve(router, prompt(1))
    assert router.route(prompt(1)).num_cached_tokens == 3 * SIZE


def test_a_replica_that_caches_nothing_is_no_ones_home():
    router = make(2, capacity=0)
    serve(router, prompt(1))
    assert router.num_chunks == 0 and router.route(prompt(1)).num_cached_tokens == 0


def test_all_replicas_together_are_bounded():
    router = make(10, max_chunks=50)
    for seed in range(100):
        serve(router, prompt(seed))
    assert router.num_chunks <= 50
    for number in range(10, 60):
        router.add_replica(number)
    router.check_integrity()


def test_what_was_used_before_an_evicted_chunk_is_forgotten_with_it():
    router = make(1)
    old, evicted, new = prompt(1), prompt(2), prompt(3)
    for ids in (old, evicted, new):
        serve(router, ids)
    serve(router, evicted, num_cached=20)  # it has lost the second half
    assert router.route(old).num_cached_tokens == 0
    assert router.route(new).num_cached_tokens == 39
    assert router.route(evicted).num_cached_tokens == 39  # it has been computed again
    router.check_integrity()


def test_a_prefix_that_is_still_being_computed_is_no_evidence():
    router = make(1)
    serve(router, prompt(9))
    first, second = router.route(prompt(1)), router.route(prompt(1))
    router.computed(second, 0)  # it did not wait for the first one
    assert router.route(prompt(9)).num_cached_tokens == 39
    router.computed(first, 0)
    router.check_integrity()


def test_the_block_of_the_last_token_is_no_evidence():
    """It is computed again, however much is cached: of whole chunks the last one is never found."""
    router = make(1)
    serve(router, prompt(1))
    serve(router, prompt(2))
    serve(router, prompt(2), num_cached=38)  # all but the last block of 2 tokens
    assert router.num_chunks == 20
    serve(router, prompt(2), num_cached=35)  # a chunk is missing: so is what was used before
    assert router.num_chunks == 10


def test_a_prompt_that_was_never_computed_is_forgotten():
    router = make(1)
    serve(router, prompt(1)[:20])
    dropped = router.route(prompt(1))
    router.finished(dropped)
    router.check_integrity()
    assert router.route(prompt(1)).num_cached_tokens == 20


def test_all_prefixes_can_be_forgotten():
    router = make(2)
    route = router.route(prompt(1))
    router.forget_prefixes()
    router.computed(route, 0)
    router.finished(route)
    router.check_integrity()
    assert router.num_chunks == 0 and router.route(prompt(1)).num_cached_tokens == 0


# ---- size and time


def test_thousands_of_replicas_and_many_prefixes_take_microseconds():
    """4,000 replicas, and 100,000 chunks of prompts that begin alike."""
    router = PrefixRouter()
    for number in range(4000):
        router.add_replica(number)
    rng = random.Random(0)
    common = prompt(0, 256)
    counter = itertools.count()
    prompts = [[*common, *[next(counter)] * 768] for _ in range(8000)]
    routes = [router.route(ids) for ids in prompts]
    assert {router.num_requests(number) for number in range(4000)} <= {1, 2, 3}
    for route in routes:
        router.computed(route, route.num_cached_tokens)
        router.finished(route)
    assert router.num_chunks >= 96_000
    times = []
    for _ in range(500):
        ids = rng.choice(prompts)
        start = time.perf_counter()
        route = router.route(ids)
        router.computed(route, route.num_cached_tokens)
        router.finished(route)
        times.append(time.perf_counter() - start)
        assert route.num_cached_tokens == 1023
    router.check_integrity()
    # 16 chunks are hashed and used; some 40 us on one core.
    assert statistics.median(times) < 400e-6


def test_the_heap_of_loads_is_bounded():
    router = make(3)
    for seed in range(2000):
        serve(router, prompt(seed % 7))
    assert len(router._by_load) <= 4 * 3 + 64


# ---- random calls


class RouterMachine(RuleBasedStateMachine):
    """Random calls against replicas that cache and evict as the engine's tree does."""

    @initialize(num=st.integers(1, 4), max_chunks=st.sampled_from([3, 20, 1000]))
    def start(self, num, max_chunks):
        self.router = PrefixRouter(chunk_size=2, max_chunks=max_chunks, request_tokens=3)
        self.open, self.numbers = [], itertools.count()
        for _ in range(num):
            self.router.add_replica(next(self.numbers), 24)

    @rule(
        ids=st.lists(st.integers(0, 1), min_size=1, max_size=20), salt=st.sampled_from([None, "s"])
    )
    def route(self, ids, salt):
        route = self.router.route(ids, salt)
        if not self.router.replicas:
            assert route is None
            return
        assert route.replica in self.router.replicas
        assert route.num_cached_tokens + route.num_waiting_tokens == len(ids)
        self.open.append(route)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def compute(self, data):
        route = data.draw(st.sampled_from(self.open))
        self.router.computed(route, data.draw(st.integers(0, 19)))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def finish(self, data):
        route = data.draw(st.sampled_from(self.open))
        self.open.remove(route)
        self.router.finished(route)

    @rule()
    def add(self):
        self.router.add_replica(next(self.numbers), 24)

    @precondition(lambda self: self.router.replicas)
    @rule(data=st.data())
    def remove(self, data):
        self.router.remove_replica(data.draw(st.sampled_from(self.router.replicas)))

    @precondition(lambda self: self.router.replicas)
    @rule(data=st.data(), tokens=st.integers(0, 50), requests=st.integers(0, 5))
    def report(self, data, tokens, requests):
        self.router.report_load(data.draw(st.sampled_from(self.router.replicas)), tokens, requests)

    @rule()
    def forget(self):
        self.router.forget_prefixes()

    @invariant()
    def is_consistent(self):
        if not hasattr(self, "router"):
            return
        self.router.check_integrity()
        by_replica = dict.fromkeys(self.router.replicas, 0)
        for route in self.open:
            if route.replica in by_replica:
                by_replica[route.replica] += 1
        assert by_replica == {n: self.router.num_requests(n) for n in self.router.replicas}

    def teardown(self):
        """When all have ended, nothing counts but what others have reported."""
        for route in getattr(self, "open", ()):
            self.router.finished(route)
        if hasattr(self, "router"):
            self.router.check_integrity()
            assert all(each.own_tokens == 0 and not each.pending for each in self.router._order)


TestRandomCalls = RouterMachine.TestCase
TestRandomCalls.settings = settings(max_examples=EXAMPLES, stateful_step_count=30, deadline=None)
