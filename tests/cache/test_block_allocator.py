"""The allocator: ids, owners, errors; and random sequences of calls (Hypothesis)."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.cache.block_allocator import BlockAllocator
from engine.errors import ContractError, EngineError, OutOfMemoryError

EXAMPLES = int(os.environ.get("ENGINE_TEST_EXAMPLES", "40"))


def test_ids_are_ascending_then_most_recently_freed_first():
    allocator = BlockAllocator(6, 16)
    assert allocator.allocate(4) == [0, 1, 2, 3]
    allocator.free([1, 3])
    assert allocator.allocate(3) == [3, 1, 4]
    assert allocator.allocate(0) == []


def test_a_failed_allocation_takes_nothing_and_lists_the_counts():
    allocator = BlockAllocator(4, 16)
    allocator.allocate(3)
    with pytest.raises(
        OutOfMemoryError, match=r"2 KV blocks of 16 tokens.*1 of 4 are free \(3 in use"
    ):
        allocator.allocate(2)
    assert allocator.num_free == 1


def test_double_free_and_sharing_of_free_blocks_are_errors():
    allocator = BlockAllocator(4, 16)
    blocks = allocator.allocate(2)
    allocator.free(blocks)
    with pytest.raises(EngineError, match="double free of block 0"):
        allocator.free(blocks)
    with pytest.raises(EngineError, match="block 1 is free and cannot be shared"):
        allocator.acquire([1])
    with pytest.raises(EngineError, match="free or already in the tree"):
        allocator.cache(0)
    with pytest.raises(EngineError, match="not in the tree"):
        allocator.uncache(0)
    with pytest.raises(ContractError, match="at least 1"):
        BlockAllocator(0, 16)


def test_a_cached_block_can_be_acquired_again_or_uncached():
    allocator = BlockAllocator(3, 16)
    blocks = allocator.allocate(2)
    for block in blocks:
        allocator.cache(block)
    assert allocator.is_shared(0) and allocator.num_owners(0) == 1
    assert allocator.free(blocks) == blocks
    assert (allocator.num_free, allocator.num_cached, allocator.num_referenced) == (1, 2, 0)
    allocator.acquire([0])
    allocator.uncache(0)
    assert (allocator.num_free, allocator.num_cached, allocator.num_referenced) == (1, 1, 1)
    allocator.uncache(1)
    assert allocator.free([0]) == []
    assert allocator.num_free == 3


def test_check_integrity_finds_corruption():
    allocator = BlockAllocator(3, 16)
    table = allocator.allocate(2)
    allocator.check_integrity([table])
    with pytest.raises(EngineError, match="block 1 has 1 owners, but is in 0 tables"):
        allocator.check_integrity([[0]])
    allocator._free.append(0)
    with pytest.raises(EngineError, match="block 0 is 1 times on the free list, with 1 owners"):
        allocator.check_integrity()
    allocator._free.pop()
    allocator.num_cached = 1
    with pytest.raises(EngineError, match="num_cached is 1"):
        allocator.check_integrity()


def test_freed_blocks_are_recorded_after_record_freed():
    allocator = BlockAllocator(3, 16)
    allocator.free(allocator.allocate(1))
    assert allocator.take_freed() == []
    allocator.record_freed()
    allocator.free(allocator.allocate(2))
    assert (allocator.take_freed(), allocator.take_freed()) == ([0, 1], [])


class AllocatorMachine(RuleBasedStateMachine):
    """Compares with a model that keeps every owner's table and a set of cached blocks."""

    @initialize(num_blocks=st.integers(1, 12))
    def start(self, num_blocks):
        self.allocator = BlockAllocator(num_blocks, 16)
        self.tables = []
        self.tree = set()

    def owned(self):
        return {block for table in self.tables for block in table}

    @rule(count=st.integers(0, 6))
    def allocate(self, count):
        free = self.allocator.num_free
        if count > free:
            with pytest.raises(OutOfMemoryError):
                self.allocator.allocate(count)
            return
        table = self.allocator.allocate(count)
        assert len(set(table)) == count
        assert not set(table) & (self.owned() | self.tree)
        self.tables.append(table)

    @rule(data=st.data())
    def fork(self, data):
        if self.tables:
            table = data.draw(st.sampled_from(self.tables))
            shared = table[: data.draw(st.integers(0, len(table)))]
            self.allocator.acquire(shared)
            self.tables.append(list(shared))

    @rule(data=st.data())
    def revive(self, data):
        cached = sorted(self.tree - self.owned())
        if cached:
            block = data.draw(st.sampled_from(cached))
            self.allocator.acquire([block])
            self.tables.append([block])

    @rule(data=st.data())
    def free(self, data):
        if not self.tables:
            return
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        cached = self.allocator.free(table)
        assert set(cached) == set(table) & self.tree - self.owned()

    @rule(data=st.data())
    def cache(self, data):
        known = sorted(self.owned() - self.tree)
        if known:
            block = data.draw(st.sampled_from(known))
            self.allocator.cache(block)
            self.tree.add(block)

    @rule(data=st.data())
    def uncache(self, data):
        if self.tree:
            block = data.draw(st.sampled_from(sorted(self.tree)))
            self.allocator.uncache(block)
            self.tree.remove(block)

    @invariant()
    def holds(self):
        if not hasattr(self, "allocator"):
            return
        allocator = self.allocator
        allocator.check_integrity(self.tables)
        assert allocator.num_referenced == len(self.owned())
        assert allocator.num_cached == len(self.tree - self.owned())
        total = allocator.num_free + allocator.num_referenced + allocator.num_cached
        assert total == allocator.num_blocks


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(
    max_examples=EXAMPLES, stateful_step_count=60, deadline=None
)
