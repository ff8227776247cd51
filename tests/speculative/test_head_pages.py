"""Which keys of a draft head are in which blocks: gaps, shared prefixes, blocks that are lost."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from engine.request import Request
from engine.speculative.head_pages import HeadPages, HeadSequence

RULES = SimpleNamespace(max_tokens=1, min_tokens=0, ignore_eos=False, stop_token_ids=None)


def make(ids, table):
    request = Request("r", list(ids), RULES)
    request.block_table = list(table)
    return request


def test_keys_without_gaps_are_where_the_targets_are():
    pages, own, request = HeadPages(16, [0] * 16), HeadSequence(), make(range(60), [7, 3, 5, 9])
    for start, stop in ((0, 5), (5, 32), (32, 33), (33, 60)):
        assert pages.extend(own, request, start, stop) == start
    assert own.table == [7, 3, 5, 9] and own.num_keys == own.next_position == 60


def test_after_a_gap_keys_go_on_in_the_same_block():
    pages, own, request = HeadPages(16, [0] * 16), HeadSequence(), make(range(80), [7, 3, 5, 9, 2])
    pages.extend(own, request, 0, 20)
    assert pages.extend(own, request, 40, 70) == 20
    assert own.table == [7, 3, 9, 2] and own.num_keys == 50 and own.next_position == 70
    other = HeadSequence()
    assert pages.extend(other, make(range(80), [7, 3, 5, 9, 8]), 64, 66) == 16
    assert other.table == [7, 8]  # only the first block is as the target's


def test_a_prefix_of_other_tokens_is_not_taken_over():
    generations = [0] * 8
    pages, own = HeadPages(16, generations), HeadSequence()
    pages.extend(own, make(range(40), [1, 2, 3]), 0, 36)
    generations[1] += 1
    generations[2] += 1
    other = HeadSequence()
    assert pages.extend(other, make([0, 0, *range(2, 40)], [1, 2, 4]), 33, 36) == 0
    assert other.table == [4]


def test_blocks_that_were_lost_are_dropped_with_all_after_them():
    pages, own, request = HeadPages(16, [0] * 16), HeadSequence(), make(range(64), [1, 2, 3, 4])
    pages.extend(own, request, 0, 60)
    pages.follow(own, request)
    assert own.num_keys == 60
    request.block_table[3] = 9  # copied before it is written to
    pages.follow(own, request)
    assert own.num_keys == own.next_position == 48 and own.table == [1, 2, 3]
    request.block_table, request.num_restarts = [1, 8, 3, 9], 1
    pages.follow(own, request)
    assert own.num_keys == own.next_position == 16 and own.table == [1]


def test_blocks_whose_keys_another_request_replaced_are_dropped():
    generations = [0] * 8
    pages = HeadPages(16, generations)
    own, request = HeadSequence(), make(range(40), [1, 2, 3])
    pages.extend(own, request, 0, 36)
    generations[2] += 1
    pages.extend(HeadSequence(), make(range(50, 90), [2]), 0, 3)
    request.num_restarts = 1
    pages.follow(own, request)
    assert own.num_keys == 16


def test_tokens_that_are_computed_again_lose_their_keys():
    pages, own, request = HeadPages(16, [0] * 16), HeadSequence(), make(range(64), [1, 2, 3, 4])
    pages.extend(own, request, 0, 60)
    pages.rewind(own, 60)
    assert own.num_keys == 60
    pages.rewind(own, 40)
    assert own.num_keys == own.next_position == 32 and own.table == [1, 2]
    assert pages.extend(own, request, 40, 60) == 32 and own.table == [1, 2, 3, 4]


def test_a_request_restarts_before_its_first_key():
    """Its prefix was cached, without keys of the head, and is computed again."""
    pages, own, request = HeadPages(16, [0] * 16), HeadSequence(), make(range(60), [4, 5, 6, 7])
    pages.extend(own, request, 40, 50)
    pages.rewind(own, 10)
    assert own.num_keys == 0 and own.next_position == 10 and own.table == []
    assert pages.extend(own, request, 10, 60) == 0 and own.table == [4, 5, 6, 7]
    # The same after its blocks were lost, as in a preemption.
    own, request = HeadSequence(), make(range(60), [4, 5, 6, 7])
    pages.extend(own, request, 32, 50)
    request.block_table, request.num_restarts = [1, 2, 3, 0], 1
    pages.follow(own, request)
    pages.rewind(own, 0)
    assert own.num_keys == own.next_position == 0
    assert pages.extend(own, request, 0, 60) == 0 and own.table == [1, 2, 3, 0]


def test_every_key_stays_where_it_was_written():
    """Requests come and go, and their keys have gaps; blocks are used again."""
    rng = np.random.default_rng(0)
    generations, free, live, num_made = [0] * 40, list(range(40)), {}, 0
    pages = HeadPages(16, generations)
    written = {}  # (block, offset) -> (request, position)
    for _ in range(2000):
        kind = rng.integers(8)
        if kind == 0 and len(free) >= 6:
            table, num_made = [free.pop() for _ in range(6)], num_made + 1
            request = make([num_made, *rng.integers(0, 9, 95).tolist()], table)
            live[num_made] = (request, HeadSequence(), [])
        elif kind == 1 and live:
            request, _, _ = live.pop(next(iter(live)))
            free[:0] = request.block_table
            for block in request.block_table:
                generations[block] += 1
        elif live:
            number = list(live)[int(rng.integers(len(live)))]
            request, own, positions = live[number]
            pages.follow(own, request)
            start = own.next_position + int(rng.integers(20)) * int(rng.integers(4) == 0)
            stop = min(96, start + 1 + int(rng.integers(12)))
            if start >= stop:
                continue
            first = pages.extend(own, request, start, stop)
            positions += range(start, stop)
            table = own.table
            for index, position in enumerate(range(start, stop), first):
                written[table[index // 16], index % 16] = number, position
            keys = [written[table[index // 16], index % 16] for index in range(own.num_keys)]
            assert keys == [(number, position) for position in positions]
