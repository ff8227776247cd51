"""State slots: cases that the scheduler's state machine reaches only by chance."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest

from engine.cache.block_manager import BlockManager
from engine.cache.state_slots import StateSlots
from engine.errors import EngineError
from engine.request import Request

RULES = SimpleNamespace(max_tokens=400, min_tokens=0, ignore_eos=True, stop_token_ids=None)
GRID = 16


def build(num_slots, num_requests, *, interval=0, num_blocks=64, **options):
    """A manager with blocks of 16 tokens, and snapshots at multiples of 16 tokens."""
    states = partial(_slots, num_slots, num_requests, interval=interval, **options)
    return BlockManager(num_blocks, 16, num_host_blocks=8, states=states)


def _slots(num_slots, num_requests, tree, **options):
    return StateSlots(num_slots, num_requests, tree=tree, grid=GRID, **options)


def request(name, ids):
    made = Request(name, list(ids), RULES)
    made.max_num_tokens = made.pause_len = 1000
    return made


def compute(manager, one, count=None):
    """Compute the next chunk at once; return its `StateAccess`."""
    states = manager.states
    start = one.num_computed_tokens
    rest = one.num_tokens - start
    count = states.fit_chunk(one, rest if count is None else count)
    access = states.access(one, start, count)
    one.num_computed_tokens = one.num_committed_tokens = start + count
    if start + count == one.num_tokens:
        one.append_tokens([start % 7])
        manager.grow(one, one.num_tokens)
    manager.cache_prefix(one)
    states.settle(states.take_moves())
    return access


def admitted(manager, name, ids):
    one = request(name, ids)
    assert manager.admit(one)
    return one


def run(manager, name, ids, num_decodes=0):
    """Serve a request to its end; return its accesses."""
    one = admitted(manager, name, ids)
    accesses = []
    while one.num_computed_tokens < len(ids) + num_decodes:
        accesses.append(compute(manager, one))
    manager.release(one)
    manager.check_integrity([])
    return accesses


def snapshot_lens(manager):
    """The lengths of all prefixes that end at a snapshot."""
    lens = []
    for node in manager.tree.walk():
        if node.snapshot is not None:
            depth, above = 0, node
            while above.parent is not None:
                depth, above = depth + 1, above.parent
            lens.append(16 * depth)
    return sorted(lens)


def test_a_prompt_takes_a_snapshot_before_its_last_token():
    for length, want in ((16, []), (17, [16]), (32, [16]), (33, [32]), (48, [32])):
        manager = build(6, 2)
        run(manager, "a", range(length))
        assert snapshot_lens(manager) == want


def test_one_chunk_takes_one_snapshot():
    """Along a prompt, chunks end where the next snapshot would be a second one."""
    manager = build(8, 2, interval=32)
    accesses = run(manager, "a", range(105))
    assert [access.snapshot_len for access in accesses] == [32, 64, 96]
    assert snapshot_lens(manager) == [32, 64, 96]


def test_chunks_end_on_the_grid():
    manager = build(6, 2)
    one = admitted(manager, "a", range(105))
    states = manager.states
    assert [states.fit_chunk(one, n) for n in (105, 50, 17, 16, 9)] == [105, 48, 16, 16, 9]
    compute(manager, one, 9)  # the budget was less than the grid
    assert [states.fit_chunk(one, n) for n in (96, 50, 20, 6)] == [96, 39, 7, 6]


def test_a_hit_reads_the_snapshot_in_place():
    manager = build(6, 2)
    run(manager, "a", range(40))
    (slot,) = (node.snapshot.slot for node in manager.tree.walk() if node.snapshot)
    one = admitted(manager, "b", range(40))
    assert one.num_computed_tokens == 32
    states = manager.states
    access = states.access(one, 32, 8)
    assert access.source == slot not in access.targets and access.snapshot < 0
    moves = states.take_moves()
    assert not moves.copies and moves.reads == [slot]
    assert not manager.tree.evict_snapshot()  # it is being read
    manager.tree.reset()  # the slot becomes free only after the step
    assert states.allocator.num_owners(slot) == 1
    states.settle(moves)
    assert states.allocator.num_owners(slot) == 0
    manager.check_integrity([one])


def test_the_least_recently_used_snapshot_is_evicted_for_a_request():
    manager = build(5, 2)
    for name, first in (("a", 100), ("b", 200), ("c", 300)):
        run(manager, name, range(first, first + 20))
    run(manager, "a again", range(100, 120))
    held = [admitted(manager, f"r{i}", range(400 + 50 * i, 410 + 50 * i)) for i in range(2)]
    assert len(snapshot_lens(manager)) == 3
    extra = manager.states._take_extra(1)  # the slots of requests are in use
    assert extra and len(snapshot_lens(manager)) == 2
    assert not manager.match(request("b", range(200, 220))).blocks
    for first in (100, 300):
        assert len(manager.match(request("x", range(first, first + 20))).blocks) == 1
    manager.states._release(extra)
    manager.check_integrity(held)


def test_snapshots_never_keep_a_request_from_running():
    """Each of `num_requests` gets a slot, however many snapshots the others hold."""
    manager = build(5, 4, interval=16)
    first = admitted(manager, "a", range(100))
    while first.num_computed_tokens < 99:
        compute(manager, first)
    assert manager.states.allocator.num_free == 0 and len(snapshot_lens(manager)) == 4
    others = [admitted(manager, f"r{i}", range(50 * i, 50 * i + 9)) for i in range(5, 8)]
    assert len(snapshot_lens(manager)) == 1
    manager.check_integrity([first, *others])


def test_decoding_leaves_its_slot_behind_once_a_grid_step():
    manager = build(6, 2)
    one = admitted(manager, "a", range(20))
    compute(manager, one)
    accesses = [compute(manager, one) for _ in range(45)]  # tokens 20 to 64
    moved = [i + 20 for i, access in enumerate(accesses) if access.source != access.targets[0]]
    assert moved == [32, 48, 64]
    # The second time the slot of the older snapshot is written.
    assert accesses[48 - 20].targets[0] == accesses[32 - 20].source
    assert len(one.state.snapshots) == 1
    manager.release(one)
    assert snapshot_lens(manager) == [16, 64]


def test_decoding_leaves_half_of_the_slots_for_prompts():
    manager = build(7, 3)
    held = [
        admitted(manager, name, range(first, first + 31))
        for name, first in (("a", 0), ("b", 50), ("c", 90))
    ]
    for one in held:
        compute(manager, one)
        compute(manager, one)
        compute(manager, one)
    assert [len(one.state.snapshots) for one in held] == [1, 1, 0]
    assert manager.states.reserve_drafts(held[2], 2)
    manager.check_integrity(held)


def test_a_snapshot_of_an_uncommitted_step_is_dropped():
    manager = build(6, 2)
    one = admitted(manager, "a", range(31))
    compute(manager, one)
    compute(manager, one)
    manager.states.access(one, 32, 1)  # in flight when the request ends
    one.num_computed_tokens = 33
    one.num_committed_tokens = 31
    manager.release(one)
    assert snapshot_lens(manager) == [16]
    manager.check_integrity([])


@pytest.mark.parametrize("num_accepted", [0, 1, 2, 3])
def test_accepted_drafts_choose_the_slot(num_accepted):
    manager = build(9, 2)
    one = admitted(manager, "a", range(29))
    compute(manager, one)  # 29 computed; token 29 is next
    states = manager.states
    assert states.reserve_drafts(one, 3)
    access = states.access(one, 29, 4)
    assert len(set(access.targets)) == 4 and access.targets[0] == access.source == one.state.slot
    states.accept(one, 29, num_accepted)
    one.num_computed_tokens = one.num_committed_tokens = 30 + num_accepted
    assert one.state.slot == access.targets[num_accepted]
    # Draft 2 is token 31: the state after it is on the grid, and kept if the request passed it.
    passed = num_accepted == 3
    assert one.state.snapshots == ([(32, access.targets[2])] if passed else [])
    assert states.allocator.num_referenced == 1 + passed
    one.output_token_ids += [1] * num_accepted
    one.num_tokens += num_accepted
    manager.check_integrity([one])


def test_drafts_from_a_snapshots_position_keep_it():
    manager = build(9, 2)
    one = admitted(manager, "a", range(31))
    compute(manager, one)
    compute(manager, one)  # 32 computed
    before = one.state.slot
    assert manager.states.reserve_drafts(one, 2)
    access = manager.states.access(one, 32, 3)
    assert access.source == before not in access.targets
    assert (32, before) in one.state.snapshots
    manager.check_integrity([one])


def test_too_few_slots_for_drafts():
    manager = build(4, 2)
    one = admitted(manager, "a", range(20))
    compute(manager, one)
    assert not manager.states.reserve_drafts(one, 3)
    assert manager.states.access(one, 20, 1).targets == (one.state.slot,)
    assert manager.states.reserve_drafts(one, 1)
    assert not manager.can_swap_out(one)  # its state is not known yet
    manager.check_integrity([one])


def test_swapped_states_come_back_in_another_slot():
    manager = build(4, 2, num_host_slots=1)
    one = admitted(manager, "a", range(20))
    compute(manager, one)
    slot = one.state.slot
    assert manager.can_swap_out(one)
    manager.swap_out(one)
    assert manager.states.take_moves().swap_out == [(slot, 0)]
    other = admitted(manager, "b", range(50, 70))
    assert not manager.can_swap_out(other)  # no host slot is left
    assert manager.admit(one)
    moves = manager.states.take_moves()
    assert moves.swap_in == [(0, one.state.slot)]
    manager.check_integrity(
        [one, other], [host for host, _ in manager.take_moves().swap_in], [moves]
    )
    manager.states.settle(moves)
    assert manager.states.host_allocator.num_free == 1


def test_a_fork_copies_the_state_at_its_position():
    manager = build(5, 3)
    one = admitted(manager, "a", range(20))
    compute(manager, one)
    child = request("child", range(20))
    child.append_tokens([5])
    assert manager.can_fork_state(one, child)
    manager.fork(one, child)
    moves = manager.states.take_moves()
    assert moves.copies == [(one.state.slot, child.state.slot)]
    sibling = request("sibling", range(20))  # would begin one token earlier
    assert not manager.can_fork_state(one, sibling)
    manager.states.settle(moves)
    manager.check_integrity([one, child])


def forked(manager, parent, name):
    child = request(name, parent.prompt_token_ids)
    child.append_tokens([5])
    assert manager.can_fork_state(parent, child)
    manager.fork(parent, child)
    return child


def test_a_fork_whose_copy_is_pending():
    """It is not swapped out, a fork of it copies the first parent's state, and it may end."""
    manager = build(6, 4, num_host_slots=4)
    one = admitted(manager, "a", range(20))
    compute(manager, one)
    child = forked(manager, one, "child")
    assert manager.can_swap_out(one) and not manager.can_swap_out(child)
    grandchild = forked(manager, child, "grandchild")
    slot = child.state.slot
    manager.release(child)
    other = forked(manager, one, "other")
    assert other.state.slot == slot  # reused at once
    moves = manager.states.take_moves()
    assert moves.copies == [
        (one.state.slot, grandchild.state.slot),
        (one.state.slot, other.state.slot),
    ]
    assert not moves.freed
    manager.states.settle(moves)
    assert manager.can_swap_out(grandchild)
    manager.check_integrity([one, grandchild, other])


def test_a_lost_slot_is_noticed():
    manager = build(5, 3)
    one = admitted(manager, "a", range(20))
    one.state.slot = 4
    with pytest.raises(EngineError, match="block 0 has 1 owners, but is in 0 tables"):
        manager.check_integrity([one])
