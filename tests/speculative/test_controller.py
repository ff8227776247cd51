"""How many drafts are verified: the best by expected tokens over cost, and never far below none."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from engine.drafts import Drafts
from engine.speculative.controller import Controller
from engine.speculative.costs import StepCosts


def chain(length):
    return Drafts(tuple(range(length)))


def costs(per_token, sizes=(1,), most=16):
    """A step costs 1 for its first token, and `per_token` for each further one."""
    lens = range(1, most + 1)
    return StepCosts(sizes, lens, [[1 + per_token * (n * m - 1) for n in lens] for m in sizes])


def taught(controller, request, num_accepted, num_drafted, times=40):
    for _ in range(times):
        controller.next_step()
        controller.record(request, num_accepted, num_drafted)


@pytest.mark.parametrize("per_token", [0.02, 0.1, 0.4])
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_one_request_gets_the_best_number(per_token, rate):
    controller, request = Controller(costs(per_token), None), object()
    # The rate of late is what was accepted over what was tried.
    tries = {0.1: (0, 9), 0.5: (1, 1), 0.9: (9, 1)}[rate]
    for step in range(300):
        controller.next_step()
        controller.record(request, tries[0] if step % 10 < 9 else 0, 12)
    estimate = controller._rate(request, controller._prior())
    gains = [
        (1 + sum(estimate**d for d in range(1, n + 1))) / (1 + per_token * n) for n in range(13)
    ]
    best = int(np.argmax(gains))
    chosen = controller.choose([(request, chain(12))], 1)
    assert chosen == ({request: best} if best else {})


def test_a_request_that_copies_gets_more_than_one_that_does_not():
    controller = Controller(costs(0.05), None)
    good, bad = object(), object()
    for _ in range(60):
        controller.next_step()
        controller.record(good, 8, 8)
        controller.record(bad, 0, 8)
    chosen = controller.choose([(good, chain(8)), (bad, chain(8))], 2)
    assert chosen[good] == 8 and chosen.get(bad, 0) <= 1


def test_graphs_need_one_number_for_all():
    sizes = (1, 64)
    table = [[1.0, 1.1, 1.2], [1.0, 2.5, 4.0]]  # 64 sequences: no more than plain
    controller = Controller(StepCosts(sizes, [1, 5, 9], table), [1, 5, 9])
    assert controller.needs_equal_lengths
    request = object()
    taught(controller, request, 8, 8)
    assert controller.choose([(request, chain(8))], 1) == {request: 8}
    assert controller.choose([(request, chain(3))], 1) == {request: 3}
    assert controller.graph_len(3) == 4 and controller.graph_len(5) == 8
    # One of 64 requests has drafts: a step of 64 x 5 tokens is too much for them.
    assert controller.choose([(request, chain(8))], 64) == {}


def test_what_takes_time_to_propose_has_to_pay_for_it():
    controller, request = Controller(costs(0.02), None), object()
    taught(controller, request, 8, 8)
    assert controller.num_worth_asking([request], 8, 1, lambda count: 0.0) == 8
    assert controller.num_worth_asking([request], 8, 1, lambda count: 2.0 * count) == 0
    # One of sixteen gains by it, and all of them take longer.
    assert controller.num_worth_asking([request], 8, 16, lambda count: 0.5) == 0
    assert controller.num_worth_asking([], 8, 16, lambda count: 0.0) == 0
    taught(controller, request, 0, 8)
    assert controller.num_worth_asking([request], 8, 1, lambda count: 0.3) == 0


def test_graphs_may_be_longer_than_what_is_proposed():
    controller = Controller(costs(0.02), [1, 17])
    assert controller.num_worth_asking([object()], 4, 1, lambda count: 0.0) == 4


def test_the_time_of_the_host_counts():
    """A step of 1 s and 8 drafts; the host needs another second, or three."""
    request = object()
    for seconds, pays in ((0.0, True), (1.0, True), (3.0, False)):
        controller = Controller(costs(0.02), [1, 9])
        taught(controller, request, 2, 8)
        for _ in range(100):
            controller.note_host_seconds(seconds)
        assert bool(controller.choose([(request, chain(8))], 1)) == pays
    controller.note_host_seconds(1e9)  # a pause
    assert controller._host_seconds < 4.0


def test_a_sample_stands_for_all():
    """16 of 64 requests: what would pay for 16 sequences need not for 64."""
    table = StepCosts([16, 64], [1, 9], [[1.0, 1.1], [1.0, 30.0]])
    proposals = [(object(), chain(8)) for _ in range(16)]
    for lens in (None, [1, 9]):
        controller = Controller(table, lens)
        before = controller._is_on
        assert controller.would_pay(proposals, 16, 16)
        assert not controller.would_pay(proposals, 16, 64)
        assert controller._is_on == before
        assert not controller.would_pay([], 16, 64)


def test_forced_drafts_are_certain():
    controller, request = Controller(costs(0.3), None), object()
    taught(controller, request, 0, 8)
    assert controller.choose([(request, chain(8))], 1) == {}
    assert controller.choose([(request, chain(8))], 1, certain={request}) == {request: 8}


def test_a_graph_must_fit_every_sequence():
    controller, request = Controller(costs(0.01), [1, 5, 9]), object()
    assert controller.choose([(request, chain(8))], 2, room=6) == {request: 4}
    assert controller.choose([(request, chain(8))], 2, room=3) == {}


@pytest.mark.parametrize("graph_lens", [None, [1, 5]])
def test_what_never_is_accepted_costs_little(graph_lens):
    """Over many steps the time lost to drafts that are never accepted is below 2 %."""
    controller = Controller(costs(0.06, most=64), graph_lens)
    requests = [object() for _ in range(8)]
    spent = plain = 0.0
    for _ in range(3000):
        controller.next_step()
        chosen = controller.choose([(r, chain(4)) for r in requests], 8)
        length = 4 if chosen and graph_lens else sum(chosen.values()) / 8
        spent += controller._costs.seconds(8, 1 + length)
        plain += controller._costs.seconds(8, 1)
        for request, count in chosen.items():
            controller.record(request, 0, count)
    assert spent / plain < 1.02


def test_what_begins_to_be_accepted_is_found():
    controller, request = Controller(costs(0.1), None), object()
    taught(controller, request, 0, 8, times=200)
    assert controller.choose([(request, chain(8))], 1) == {}
    for _ in itertools.repeat(None, 2000):
        controller.next_step()
        chosen = controller.choose([(request, chain(8))], 1)
        if chosen:
            controller.record(request, chosen[request], chosen[request])
    assert chosen == {request: 8}


def test_it_does_not_flutter():
    """Near the break-even point the choice does not change with every step."""
    controller, request = Controller(costs(0.3), None), object()
    rng, changes, before = np.random.default_rng(0), 0, None
    for _ in range(2000):
        controller.next_step()
        is_on = bool(controller.choose([(request, chain(4))], 1))
        changes += before is not None and is_on != before
        before = is_on
        if is_on:
            controller.record(request, int(rng.random() < 0.3), 1)
    assert changes < 100


def test_without_adaption_all_are_taken():
    controller = Controller(costs(9.0), None, is_adaptive=False)
    request = object()
    taught(controller, request, 0, 8)
    assert controller.choose([(request, chain(8))], 1) == {request: 8}
    assert controller.num_worth_asking([request], 8, 1, lambda count: 99.0) == 8


def test_a_tree_is_taken_from_its_start():
    controller, request = Controller(costs(0.01), None), object()
    taught(controller, request, 3, 3)
    tree = Drafts((5, 6, 7, 8), (-1, -1, 0, 1))
    assert controller.choose([(request, tree)], 1) == {request: 4}
    dear = Controller(costs(0.45), None)
    taught(dear, request, 1, 3)
    assert dear.choose([(request, tree)], 1).get(request, 0) < 4


def test_forgotten_requests_leave_nothing():
    controller = Controller(costs(0.1), None)
    for _ in range(50):
        request = object()
        controller.record(request, 1, 2)
        controller.forget(request)
        controller.forget(request)
    assert not controller._of


def test_costs_between_and_beyond_the_points():
    table = StepCosts([1, 4], [1, 3], [[1.0, 2.0], [2.0, 6.0]])
    assert table.seconds(1, 1) == 1.0 and table.seconds(1, 2) == 1.5 and table.seconds(4, 3) == 6.0
    assert table.seconds(2, 1) == pytest.approx(1 + 1 / 3)
    assert table.seconds(7, 1) == pytest.approx(3.0) and table.seconds(1, 5) == pytest.approx(3.0)
    one = StepCosts([1], [1], [[2.0]])
    assert one.seconds(3, 2) == pytest.approx(12.0)
    # A time that was disturbed is corrected by those of more tokens.
    noisy = StepCosts([1], [1, 2, 4], [[5.0, 1.0, 3.0]])
    assert noisy.seconds(1, 1) == 1.0 and noisy.seconds(1, 3) == 2.0
    assert StepCosts([1], [1, 2], [[2.0, 1.0]]).seconds(4, 2) == 1.0
