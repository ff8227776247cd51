"""Block tables: cases that the scheduler's tests reach only by chance."""

from __future__ import annotations

from types import SimpleNamespace

from engine.cache.block_manager import BlockManager
from engine.request import Request

RULES = SimpleNamespace(max_tokens=40, min_tokens=0, ignore_eos=True, stop_token_ids=None)


def running(manager, name, token, num_tokens=20):
    """Return a request whose prompt is computed and that has sampled one token."""
    request = Request(name, [token] * num_tokens, RULES)
    assert manager.admit(request)
    request.num_computed_tokens = request.num_committed_tokens = num_tokens
    request.append_tokens([token])
    return request


def fork(manager, parent, name):
    child = Request(name, parent.prompt_token_ids, RULES)
    child.append_tokens([parent.output_token_ids[0]])
    manager.fork(parent, child)
    return child


def test_the_source_of_a_pending_copy_is_not_reused():
    manager = BlockManager(8, 16, prefix_caching=False)
    first, second = running(manager, "a", 1), running(manager, "b", 2)
    child, other = fork(manager, first, "a2"), fork(manager, second, "b2")
    assert manager.grow(child, child.num_tokens)  # copies the partial block of the first
    manager.release(first)  # the block's last owner releases it in the same step
    assert manager.grow(other, other.num_tokens)
    copies = manager.take_moves().copies
    assert [source for source, _ in copies] == [1, 3]
    assert not {source for source, _ in copies} & {target for _, target in copies}
    manager.check_integrity([child, second, other])
    assert manager.allocator.num_free == 8 - 1 - 1 - 3


def test_the_last_owner_writes_in_place():
    manager = BlockManager(8, 16)
    parent = running(manager, "a", 1)
    children = [fork(manager, parent, f"c{i}") for i in range(3)]
    for request in (*children, parent):
        assert manager.grow(request, request.num_tokens)
    assert len(manager.take_moves().copies) == 3
    assert parent.block_table == [0, 1]
    assert manager.allocator.generations[:2] == [0, 1]  # its partial block is continued differently
    manager.check_integrity([parent, *children])


def test_a_failed_grow_changes_nothing():
    manager = BlockManager(4, 16)
    parent = running(manager, "a", 1, 60)
    child = Request("c", parent.prompt_token_ids, RULES)
    child.append_tokens([1])
    manager.fork(parent, child)
    table = list(child.block_table)
    assert not manager.grow(child, child.num_tokens)  # the partial block must be copied
    assert child.block_table == table and child.shares_last_block
    assert not manager.admit(Request("b", [2], RULES))
    assert manager.take_moves().copies == []
    manager.check_integrity([parent, child])


def test_take_freed_excludes_blocks_that_a_move_fills():
    manager = BlockManager(4, 16, prefix_caching=False)
    manager.allocator.record_freed()
    parent = running(manager, "a", 1)
    child = fork(manager, parent, "c")
    manager.release(running(manager, "gone", 2, 16))
    assert manager.grow(child, child.num_tokens)
    moves = manager.take_moves()
    assert moves.copies == [(1, 2)]
    assert manager.take_freed(moves.copies) == []  # block 2 was freed, and is filled by the copy


def test_a_swapped_request_shares_no_more_than_it_had_computed():
    manager = BlockManager(8, 16, num_host_blocks=4)
    request, other = Request("a", [1] * 60, RULES), running(manager, "b", 1, 60)
    assert manager.admit(request)
    request.num_computed_tokens = request.num_committed_tokens = 20  # within a long prefill
    manager.swap_out(request)
    manager.take_moves()
    manager.release(other)  # the tree has 48 tokens now
    assert manager.match(request).num_blocks == 3
    assert manager.admit(request)
    moves = manager.take_moves()
    assert len(moves.swap_in) == 1 and request.num_computed_tokens == 20
    manager.settle(moves.swap_in)
    manager.check_integrity([request])
    assert manager.host_allocator.num_free == 4


def test_a_request_caches_its_prefix_again_after_a_reset():
    manager = BlockManager(8, 16)
    request = running(manager, "a", 1, 40)
    manager.cache_prefix(request)
    assert request.num_tree_blocks == 2
    manager.tree.reset()
    request.num_computed_tokens = request.num_committed_tokens = 48
    request.output_token_ids += [1] * 8
    manager.cache_prefix(request)
    assert request.num_tree_blocks == manager.tree.num_nodes == 3
    manager.check_integrity([request])
