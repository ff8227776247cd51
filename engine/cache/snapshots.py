"""Snapshots of recurrent states in the prefix tree, with an eviction order of their own.

A state is valid at one position only, so a cached prefix can be continued only where a snapshot of
the states was taken: at a node of the tree that holds one. A snapshot is a state slot like that of
a request, and as large as the keys and values of thousands of tokens; see docs/states.md.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.cache.block_allocator import BlockAllocator
from engine.cache.lru import LruHeap
from engine.cache.tree_node import Snapshot, TreeNode
from engine.errors import EngineError

__all__ = ["SnapshotCache"]


class SnapshotCache:
    """The snapshots of a prefix tree; those without a reader can be evicted.

    Parameters
    ----------
    allocator : BlockAllocator
        The allocator of the state slots.

    Attributes
    ----------
    num_taken, num_evicted : int
        Counters.

    Examples
    --------
    >>> from engine.cache.tree_node import Space
    >>> allocator = BlockAllocator(num_blocks=2, block_size=1)
    >>> cache = SnapshotCache(allocator)
    >>> node = TreeNode(b"", None, Space(None, lambda node: False), -1)
    >>> [slot] = allocator.allocate(1)
    >>> cache.put(node, slot)                   # the slot now belongs to the tree
    >>> node.snapshot.slot, allocator.num_cached, cache.evict(), allocator.num_free
    (0, 1, True, 2)
    """

    def __init__(self, allocator: BlockAllocator) -> None:
        self.num_taken = 0
        self.num_evicted = 0
        self._allocator = allocator
        self._by_slot: dict[int, Snapshot] = {}
        self._lru: LruHeap[Snapshot] = LruHeap(self._can_evict)
        self._clock = 0

    def __len__(self) -> int:
        return len(self._by_slot)

    def put(self, node: TreeNode, slot: int) -> None:
        """Give `slot`, which has one owner, to `node`, which has no snapshot."""
        self._allocator.cache(slot)
        self._by_slot[slot] = node.snapshot = Snapshot(slot, node)
        self.num_taken += 1
        self.release([slot])

    def release(self, slots: Iterable[int]) -> None:
        """Remove one owner from each of `slots`; snapshots left without one can be evicted."""
        self._clock += 1
        for slot in self._allocator.free(slots):
            snapshot = self._by_slot[slot]
            snapshot.last_used = self._clock
            self._lru.push(snapshot, len(self._by_slot))

    def evict(self) -> bool:
        """Free the slot of the least recently used snapshot; False without a candidate."""
        snapshot = self._lru.pop()
        if snapshot is None:
            return False
        assert snapshot.node is not None
        self.remove(snapshot.node)
        self.num_evicted += 1
        return True

    def remove(self, node: TreeNode) -> None:
        """Drop the snapshot of `node`. A slot that is being read becomes free after that."""
        snapshot = node.snapshot
        assert snapshot is not None
        node.snapshot = snapshot.node = None
        del self._by_slot[snapshot.slot]
        self._allocator.uncache(snapshot.slot)

    def check_integrity(self, nodes: Iterable[TreeNode]) -> None:
        """Check that the snapshots are those of `nodes`, all nodes of the tree.

        Raises
        ------
        EngineError
            If they differ.
        """
        found = {node.snapshot.slot: node for node in nodes if node.snapshot is not None}
        held = {slot: snapshot.node for slot, snapshot in self._by_slot.items()}
        if found != held:
            raise EngineError(f"the tree holds snapshots {sorted(found)}, not {sorted(held)}")

    def _can_evict(self, snapshot: Snapshot) -> bool:
        return snapshot.node is not None and not self._allocator.num_owners(snapshot.slot)
