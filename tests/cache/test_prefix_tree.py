"""The prefix tree: match, insert, lock, evict, quotas, host tier; and random calls (Hypothesis)."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.cache import prefix_tree
from engine.cache.block_allocator import BlockAllocator
from engine.cache.prefix_tree import PrefixTree
from engine.errors import EngineError

EXAMPLES = int(os.environ.get("ENGINE_TEST_EXAMPLES", "40"))
SIZE = 4  # tokens per block; the tree accepts any number


def build(num_blocks=16, num_host=0, **options):
    host = BlockAllocator(num_host, SIZE) if num_host else None
    return PrefixTree(BlockAllocator(num_blocks, SIZE), host_allocator=host, **options)


def put(tree, ids, key=(None, False, 0, 0)):
    """Do what a request with `ids` does: match, acquire, insert, release."""
    found = tree.match(ids, key)
    tree.allocator.acquire(found.blocks)
    wanted = -(-len(ids) // SIZE) - len(found.blocks)
    tree.evict(wanted - tree.allocator.num_free)
    table = found.blocks + tree.allocator.allocate(wanted)
    tree.insert(ids, table, key, leaving=True)
    tree.release(table)
    tree.check_integrity()
    return table


def test_match_covers_full_blocks_up_to_the_first_difference():
    tree = build()
    table = put(tree, list(range(10)))
    assert tree.match(list(range(10))).blocks == table[:2]
    assert tree.match(list(range(7))).blocks == table[:1]
    assert tree.match([0, 1, 2, 3, 4, 5, 6, 99]).blocks == table[:1]
    assert tree.match([1, 1, 2, 3]).blocks == []
    assert tree.match(list(range(10)), max_blocks=1).blocks == table[:1]
    assert tree.match([]).num_blocks == 0


def test_chunks_are_compared_and_not_only_hashed(monkeypatch):
    class Collides(bytes):
        def __hash__(self):
            return 0

    def collide(token_ids, block_size, num_chunks):
        return map(Collides, split(token_ids, block_size, num_chunks))

    split = prefix_tree.split_chunks
    monkeypatch.setattr(prefix_tree, "split_chunks", collide)
    tree = build()
    first, second = put(tree, [1, 2, 3, 4]), put(tree, [5, 6, 7, 8])
    assert tree.match([1, 2, 3, 4]).blocks == first
    assert tree.match([5, 6, 7, 8]).blocks == second
    assert tree.match([9, 9, 9, 9]).blocks == []


def test_keys_separate_tenants_and_rope_kinds():
    tree = build()
    put(tree, [1] * 8, ("a", False, 0))
    for key in ((None, False, 0, 0), ("b", False, 0, 0), ("a", True, 0, 0), (None, False, 1, 0)):
        assert tree.match([1] * 8, key).blocks == []
    assert len(tree.match([1] * 8, ("a", False, 0)).blocks) == 2


def test_the_least_recently_used_unowned_leaf_is_evicted_first():
    tree = build(num_blocks=6)
    old = put(tree, [1] * 8)
    new = put(tree, [2] * 8)
    tree.allocator.acquire(tree.match([1] * 4).blocks)  # the first block of the oldest path
    assert tree.evict(1) == 1
    assert tree.match([1] * 8).blocks == old[:1]
    assert tree.evict(1) == 1
    assert tree.match([2] * 8).blocks == new[:1]
    assert tree.evict(5) == 1  # the locked one stays
    assert tree.match([1] * 8).blocks == old[:1] and tree.match([2] * 8).blocks == []
    tree.release(old[:1])
    assert tree.evict(5) == 1 and tree.num_nodes == 0
    assert tree.allocator.num_free == 6
    tree.check_integrity()


def test_use_postpones_eviction():
    tree = build(num_blocks=6)
    first, second = put(tree, [1] * 4), put(tree, [2] * 4)
    put(tree, [1] * 4)
    tree.evict(1)
    assert tree.match([1] * 4).blocks == first and not tree.match([2] * 4).blocks
    assert second != first


def test_an_owner_that_continues_keeps_its_own_copy():
    tree = build()
    ids = list(range(12))
    known = put(tree, ids[:8])
    own = tree.allocator.allocate(3)
    assert tree.insert(ids, own) == 0  # another request has computed it in the meantime
    assert tree.match(ids).blocks == known[:2]
    assert tree.insert(ids, own, leaving=True) == 0  # only missing nodes are added
    tree.release(own)
    assert tree.match(ids).blocks == [*known[:2], own[2]]
    assert tree.allocator.num_free == 16 - 3
    tree.check_integrity()


def test_a_shared_copy_is_not_put_below_blocks_that_its_owners_do_not_own():
    tree = build()
    ids = list(range(12))
    put(tree, ids[:8])
    own = tree.allocator.allocate(3)
    tree.allocator.acquire(own)  # a fork shares it
    tree.insert(ids, own, leaving=True)
    tree.release(own)
    assert tree.match(ids).num_blocks == 2
    tree.release(own)
    tree.check_integrity()


def test_insert_continues_from_start():
    tree = build()
    ids = list(range(16))
    table = tree.allocator.allocate(4)
    assert tree.insert(ids[:8], table) == 2
    assert tree.insert(ids[8:], table, start=2) == 4
    assert tree.insert([], table, start=4) == 4
    assert tree.match(ids).blocks == table


def test_a_quota_limits_only_its_salt():
    tree = build(num_blocks=32, max_blocks_per_salt=2)
    for start in range(6):
        put(tree, [start] * 8, ("greedy", False, 0))
        put(tree, [start] * 8)
    assert tree.num_nodes == 2 + 12
    assert tree.match([5] * 8, ("greedy", False, 0)).num_blocks == 2
    put(tree, list(range(20)), ("greedy", False, 0))  # longer than the quota: a prefix is kept
    assert tree.match(list(range(20)), ("greedy", False, 0)).num_blocks == 2
    put(tree, [7] * 4, ("greedy", True, 0))  # the same salt with another rope kind counts, too
    assert tree.num_nodes == 2 + 12


def test_a_quota_filled_by_owned_blocks_admits_nothing():
    tree = build(max_blocks_per_salt=1)
    table = tree.allocator.allocate(2)
    assert tree.insert([1] * 8, table, ("a", False, 0)) == 1
    tree.release(table)
    put(tree, [2] * 4, ("a", False, 0))
    assert tree.match([2] * 4, ("a", False, 0)).num_blocks == 1
    assert tree.match([1] * 4, ("a", False, 0)).num_blocks == 0


def test_spaces_of_tenants_disappear_with_their_last_block():
    tree = build(num_blocks=4)
    for tenant in range(100):
        put(tree, [1] * 4, (f"t{tenant}", False, 0))
    assert len(tree._spaces) <= 4


def test_evicted_blocks_move_to_the_host_and_back():
    tree = build(num_blocks=4, num_host=3)
    ids = list(range(8))
    table = put(tree, ids)
    assert tree.evict(2) == 2
    assert tree.take_offloads() == [(table[1], 0), (table[0], 1)]
    found = tree.match(ids)
    assert found.blocks == [] and [n.host_block for n in found.host_nodes] == [1, 0]
    assert (tree.num_nodes, tree.num_host_nodes) == (2, 2)
    tree.check_integrity()
    new = tree.allocator.allocate(2)
    assert tree.load(found.host_nodes, new) == [(1, new[0]), (0, new[1])]
    assert tree.match(ids).blocks == new
    tree.host_allocator.free([0, 1])
    tree.release(new)
    tree.check_integrity()


def test_a_full_host_drops_its_oldest_node():
    tree = build(num_blocks=8, num_host=2)
    for start in range(4):
        put(tree, [start] * 4)
    tree.evict(4)
    assert [tree.match([start] * 4).num_blocks for start in range(4)] == [0, 0, 1, 1]
    assert sorted(host for _, host in tree.take_offloads()) == [0, 1]
    assert tree.evict_host(5) == 2 and tree.host_allocator.num_free == 2


def test_a_pending_offload_is_cancelled_when_its_host_block_is_freed():
    tree = build(num_blocks=8, num_host=2)
    put(tree, [1] * 8)
    tree.evict(2)
    assert tree.evict_host(1) == 1
    assert len(tree.take_offloads()) == 1


def test_forget_removes_the_nodes_and_their_descendants():
    tree = build(num_host=4)
    ids = list(range(16))
    table = put(tree, ids)
    tree.evict(1)
    tree.forget([table[1]], [])
    assert tree.match(ids).blocks == table[:1] and tree.num_host_nodes == 0
    tree.evict(1)
    tree.forget([], [tree.match(ids).host_nodes[0].host_block])
    assert tree.num_nodes == 0
    tree.check_integrity()


def test_reset_leaves_owned_blocks_to_their_owners():
    tree = build(num_blocks=4)
    table = tree.allocator.allocate(2)
    tree.insert([1] * 8, table)
    tree.reset()
    assert tree.num_nodes == 0 and tree.allocator.num_referenced == 2
    tree.release(table)
    assert tree.allocator.num_free == 4


def test_check_integrity_finds_corruption():
    tree = build()
    table = put(tree, [1] * 12)
    tree.allocator.acquire(table[2:])  # owned, but its ancestors are not
    with pytest.raises(EngineError, match="owned, but its parent is not"):
        tree.check_integrity()
    tree.release(table[2:])
    tree._nodes[table[0]].num_device_children = 0
    with pytest.raises(EngineError, match="0 device children, has 1"):
        tree.check_integrity()


class TreeMachine(RuleBasedStateMachine):
    """Compares with a model of what was inserted by whom; a match must be an inserted prefix."""

    @initialize(num_blocks=st.integers(4, 12), num_host=st.integers(0, 4), quota=st.integers(0, 4))
    def start(self, num_blocks, num_host, quota):
        self.tree = build(num_blocks, num_host, max_blocks_per_salt=quota or None)
        self.content = {}  # device block -> (key, ids up to and including it)
        self.host = {}
        self.owners = []  # (key, ids, table, number of its blocks in the tree)

    ids = st.lists(st.sampled_from([0, 0, 0, 1]), min_size=1, max_size=20)
    keys = st.sampled_from([(None, False, 0, 0), ("a", False, 0, 0), ("a", True, 0, 0)])

    def move(self):
        for device, host in self.tree.take_offloads():
            self.host[host] = self.content[device]

    def check_match(self, found, ids, key):
        for index, block in enumerate(found.blocks):
            assert self.content[block] == (key, ids[: (index + 1) * SIZE])
        for index, node in enumerate(found.host_nodes, len(found.blocks)):
            assert self.host[node.host_block] == (key, ids[: (index + 1) * SIZE])

    @rule(ids=ids, key=keys)
    def arrive(self, ids, key):
        """Lock the cached prefix, load its host part, compute the rest."""
        tree, allocator = self.tree, self.tree.allocator
        found = tree.match(ids, key)
        self.check_match(found, ids, key)
        revived = sum(not allocator.num_owners(block) for block in found.blocks)
        wanted = -(-len(ids) // SIZE) - len(found.blocks)
        if wanted + revived > allocator.num_free + allocator.num_cached:
            return
        tree.allocator.acquire(found.blocks)
        for node in found.host_nodes:
            node.is_pinned = True
        lacking = wanted - allocator.num_free
        assert tree.evict(lacking) == max(0, lacking)  # every cached block can be evicted
        new = allocator.allocate(wanted)
        for node in found.host_nodes:
            node.is_pinned = False
        self.move()
        loads = tree.load(found.host_nodes, new[: len(found.host_nodes)])
        for host, device in loads:
            self.content[device] = self.host[host]
            tree.host_allocator.free([host])
        for index, block in enumerate(new[len(loads) :], len(found.blocks) + len(loads)):
            self.content[block] = (key, ids[: (index + 1) * SIZE])
        self.owners.append([key, ids, found.blocks + new, found.num_blocks])

    @rule(data=st.data())
    def share(self, data):
        """The owner inserts its blocks, and continues."""
        if self.owners:
            owner = data.draw(st.sampled_from(self.owners))
            self.insert(owner, leaving=False)

    @rule(data=st.data())
    def fork(self, data):
        if self.owners:
            key, ids, table, known = data.draw(st.sampled_from(self.owners))
            count = data.draw(st.integers(0, len(table)))
            self.tree.allocator.acquire(table[:count])
            self.owners.append([key, ids[: count * SIZE], table[:count], min(known, count)])

    @rule(data=st.data())
    def leave(self, data):
        if self.owners:
            owner = self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1)))
            self.insert(owner, leaving=True)
            self.tree.release(owner[2])

    def insert(self, owner, *, leaving):
        key, ids, table, known = owner
        if known and not self.tree.has_block(table[known - 1]):
            known = 0
        owner[3] = self.tree.insert(ids[known * SIZE :], table, key, start=known, leaving=leaving)

    @rule(count=st.integers(1, 4))
    def evict(self, count):
        self.tree.evict(count)
        self.move()

    @rule(count=st.integers(1, 3))
    def evict_host(self, count):
        self.tree.evict_host(count)

    @rule()
    def reset(self):
        self.tree.reset()

    @invariant()
    def holds(self):
        if not hasattr(self, "tree"):
            return
        self.tree.check_integrity()
        self.tree.allocator.check_integrity(table for _, _, table, _ in self.owners)

    def teardown(self):
        if hasattr(self, "tree"):
            for owner in self.owners:
                self.tree.release(owner[2])
            self.tree.reset()
            assert self.tree.allocator.num_free == self.tree.allocator.num_blocks
            host = self.tree.host_allocator
            assert host is None or host.num_free == host.num_blocks
            assert not self.tree._spaces


TestTreeMachine = TreeMachine.TestCase
TestTreeMachine.settings = settings(max_examples=EXAMPLES, stateful_step_count=60, deadline=None)
