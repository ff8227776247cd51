"""Radix tree of computed prefixes: maps token ids to block ids; it holds no keys or values.

One node is one full block; the edge to it is the block's token ids, so a path from a root spells
a prefix. Ids are compared byte for byte, never by hash alone. Every `key` (cache salt, long rope,
adapter, epoch) has its own root, so one tenant's prefixes are invisible to another.

A block in use has an owner in the allocator and cannot be evicted. Once its last owner releases it,
it is *cached*: it can be owned again, or be evicted, least recently used first and leaves before
their parents. With a host tier, an evicted block moves to host memory and its node stays.

The tree relies on one invariant, which every caller of `insert` must keep: the owner of a node's
block also owns the blocks of all its ancestors. So every cached block can be freed by evicting
leaves, and exactly `allocator.num_cached` blocks can be freed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from engine.cache.block_allocator import BlockAllocator
from engine.cache.lru import LruHeap
from engine.cache.snapshots import SnapshotCache
from engine.cache.tree_check import check_tree
from engine.cache.tree_node import (
    NO_BLOCK,
    PrefixMatch,
    Snapshot,
    Space,
    TreeNode,
    TreeStats,
    is_device_leaf,
    is_host_leaf,
    split_chunks,
)
from engine.errors import EngineError
from engine.request import PrefixKey

__all__ = ["PrefixTree"]

_PLAIN = PrefixKey()


class PrefixTree:
    """Computed prefixes, in full blocks.

    Parameters
    ----------
    allocator : BlockAllocator
        The allocator of the device blocks.
    max_blocks_per_salt : int, optional
        Maximum number of nodes per cache salt (unlimited for requests without a salt).
    host_allocator : BlockAllocator, optional
        Blocks of the host tier; without it, evicted blocks are dropped.

    Attributes
    ----------
    snapshots : SnapshotCache or None
        For a model with states: their snapshots. A match then ends at one.

    Examples
    --------
    >>> allocator = BlockAllocator(num_blocks=8, block_size=16)
    >>> tree = PrefixTree(allocator)
    >>> ids, table = list(range(40)), allocator.allocate(3)
    >>> tree.insert(ids, table)                      # two full blocks; the third is partial
    2
    >>> tree.release(table)
    >>> tree.match(ids).blocks, tree.match([99, *ids]).blocks, allocator.num_cached
    ([0, 1], [], 2)
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        *,
        max_blocks_per_salt: int | None = None,
        host_allocator: BlockAllocator | None = None,
    ) -> None:
        self.allocator = allocator
        self.host_allocator = host_allocator
        self.max_blocks_per_salt = max_blocks_per_salt
        self.block_size = allocator.block_size
        self.stats = TreeStats()
        self.generation = 0  # changes whenever the result of a match may change
        self.snapshots: SnapshotCache | None = None
        self._offloads: dict[int, int] = {}  # host block -> device block, not yet copied
        self._spaces: dict[str | None, Space] = {}
        self._nodes: dict[int, TreeNode] = {}  # device block -> node
        self._clock = 0
        self._device_lru: LruHeap[TreeNode] = LruHeap(self._can_evict)
        self._host_lru: LruHeap[TreeNode] = LruHeap(is_host_leaf)

    @property
    def num_nodes(self) -> int:
        """Number of nodes, on device and host."""
        return sum(space.num_nodes for space in self._spaces.values())

    @property
    def num_host_nodes(self) -> int:
        """Number of nodes on the host."""
        return self.num_nodes - len(self._nodes)

    def has_block(self, block: int) -> bool:
        """Tell whether a device block is a node of the tree."""
        return block in self._nodes

    # ---- lookup

    def match(
        self,
        token_ids: Sequence[int],
        key: PrefixKey = _PLAIN,
        max_blocks: int | None = None,
    ) -> PrefixMatch:
        """Return the longest cached prefix of `token_ids`, in full blocks. Changes nothing.

        Valid until the tree changes; acquire its blocks in the allocator to keep them.
        """
        found = PrefixMatch()
        ends: list[tuple[int, Snapshot]] = []  # lengths in blocks at which a snapshot was taken
        space = self._spaces.get(key[0])
        node = space.roots.get(key) if space else None
        if node is None:
            return found
        limit = len(token_ids) // self.block_size
        limit = limit if max_blocks is None else min(limit, max_blocks)
        for chunk in split_chunks(token_ids, self.block_size, limit):
            node = node.children.get(chunk)
            if node is None:
                break
            if node.block != NO_BLOCK:
                found.blocks.append(node.block)
            else:
                found.host_nodes.append(node)
            if node.snapshot is not None:
                ends.append((found.num_blocks, node.snapshot))
        return found if self.snapshots is None else _up_to_snapshot(found, ends)

    def node_at(self, token_ids: Sequence[int], key: PrefixKey) -> TreeNode | None:
        """Return the node at which `token_ids`, full blocks, end; None if they are not cached."""
        space = self._spaces.get(key[0])
        node = space.roots.get(key) if space else None
        num_chunks = len(token_ids) // self.block_size
        for chunk in split_chunks(token_ids, self.block_size, num_chunks):
            if node is None:
                return None
            node = node.children.get(chunk)
        return node

    def put_snapshot(self, node: TreeNode, slot: int) -> None:
        """Give state slot `slot`, which has one owner, to `node`."""
        assert self.snapshots is not None
        self.snapshots.put(node, slot)
        self.generation += 1

    def evict_snapshot(self) -> bool:
        """Free the state slot of the least recently used snapshot; False without a candidate."""
        is_freed = self.snapshots is not None and self.snapshots.evict()
        self.generation += is_freed
        return is_freed

    def release(self, blocks: Iterable[int]) -> None:
        """Remove one owner from each of `blocks`; those left without one become cached or free."""
        cached = self.allocator.free(blocks)
        if not cached:
            return
        self._clock += 1
        for block in cached:
            node = self._nodes[block]
            node.last_used = self._clock
            self._offer(node)

    # ---- insertion

    def insert(
        self,
        token_ids: Sequence[int],
        blocks: Sequence[int],
        key: PrefixKey = _PLAIN,
        *,
        start: int = 0,
        leaving: bool = False,
    ) -> int:
        """Insert the full blocks of an owner's table.

        Parameters
        ----------
        token_ids : sequence of int
            Token ids from block `start` on.
        blocks : sequence of int
            The owner's block table, from its first block on.
        key : PrefixKey
            Selects the root.
        start : int
            Number of leading blocks of the table that are already nodes of the tree.
        leaving : bool
            False: the owner keeps its table. Insertion stops at tokens that the tree holds in
            another block: the owner does not own that block, so it may own no node below it.
            True: the owner releases its table right after this call. Its duplicate is not needed,
            and insertion continues below the tree's block, unless the duplicate has other owners.

        Returns
        -------
        int
            Number of leading blocks of the table that are now nodes of the tree.
        """
        num_full = min(len(token_ids) // self.block_size, len(blocks) - start)
        if num_full <= 0:
            return start
        node = self._nodes[blocks[start - 1]] if start else self._root(key)
        num_known = start
        is_own_path = True
        for index, chunk in enumerate(split_chunks(token_ids, self.block_size, num_full), start):
            block = blocks[index]
            child = node.children.get(chunk)
            is_own_path = is_own_path and (child is None or child.block in (block, NO_BLOCK))
            if not is_own_path and (not leaving or self.allocator.num_owners(block) > 1):
                break
            if child is None:
                child = self._add_node(node, chunk, block)
                if child is None:
                    break  # blocks in use fill the salt's quota
            elif child.block == NO_BLOCK:
                self._return_to_device(child, block)
                self._free_host(child)
            node = child
            num_known += is_own_path
        return num_known

    def load(self, nodes: Sequence[TreeNode], blocks: Sequence[int]) -> list[tuple[int, int]]:
        """Assign device blocks, owned by the caller, to the host nodes of a match.

        Returns the required (host, device) copies. The host blocks stay allocated until the caller
        frees them, after the copy.
        """
        pairs = []
        for node, block in zip(nodes, blocks, strict=True):
            pairs.append((node.host_block, block))
            self._return_to_device(node, block)
            node.host_block = NO_BLOCK
        return pairs

    # ---- eviction

    def evict(self, num_blocks: int) -> int:
        """Free up to `num_blocks` cached device blocks, least recently used leaves first.

        Returns the number freed.
        """
        for count in range(num_blocks):
            node = self._device_lru.pop()
            if node is None:
                return count
            self._evict(node)
        return max(0, num_blocks)

    def evict_host(self, num_blocks: int) -> int:
        """Free up to `num_blocks` host blocks, in the same order; return the number freed."""
        count = 0
        kept = []
        while count < num_blocks and (node := self._host_lru.pop()) is not None:
            if node.is_pinned:
                kept.append(node)
                continue
            self._remove(node)
            count += 1
        for node in kept:
            self._host_lru.push(node, self.num_host_nodes)
        return count

    @property
    def has_offloads(self) -> bool:
        """Tell whether evicted blocks await their copy to the host (`take_offloads`)."""
        return bool(self._offloads)

    def take_offloads(self) -> list[tuple[int, int]]:
        """Return the (device, host) copies of blocks evicted since the last call."""
        pairs = [(device, host) for host, device in self._offloads.items()]
        self._offloads.clear()
        return pairs

    def forget(self, blocks: Iterable[int], host_blocks: Iterable[int]) -> None:
        """Remove the nodes of these blocks, whose content may be wrong, and their descendants."""
        wrong = [self._nodes[block] for block in blocks if block in self._nodes]
        wrong_host = set(host_blocks)
        wrong += [n for n in self.walk() if n.host_block in wrong_host] if wrong_host else []
        for node in wrong:
            self._remove_subtree(node)

    def reset(self) -> None:
        """Remove all nodes; blocks in use stay with their owners."""
        for space in list(self._spaces.values()):
            for root in list(space.roots.values()):
                for node in list(root.children.values()):
                    self._remove_subtree(node)

    # ---- helpers

    def _root(self, key: PrefixKey) -> TreeNode:
        space = self._spaces.get(key[0])
        if space is None:
            space = self._spaces[key[0]] = Space(key[0], self._can_evict)
        if key not in space.roots:
            space.roots[key] = TreeNode(b"", None, space, NO_BLOCK)
        return space.roots[key]

    def _can_evict(self, node: TreeNode) -> bool:
        return is_device_leaf(node) and self.allocator.num_owners(node.block) == 0

    def _offer(self, node: TreeNode) -> None:
        """Push `node` on the eviction queues if it is a candidate."""
        if is_host_leaf(node):
            self._host_lru.push(node, self.num_host_nodes)
            if self._has_quota(node.space):
                node.space.host_lru.push(node, node.space.num_nodes)
        elif self._can_evict(node):
            self._device_lru.push(node, len(self._nodes))
            if self._has_quota(node.space):
                node.space.device_lru.push(node, node.space.num_nodes)

    def _has_quota(self, space: Space) -> bool:
        return self.max_blocks_per_salt is not None and space.salt is not None

    def _add_node(self, parent: TreeNode, chunk: bytes, block: int) -> TreeNode | None:
        space = parent.space
        if self._has_quota(space) and not self._keep_quota(space, parent):
            return None
        node = TreeNode(chunk, parent, space, NO_BLOCK)
        parent.children[chunk] = node
        space.num_nodes += 1
        node.last_used = self._clock
        self._return_to_device(node, block)
        return node

    def _return_to_device(self, node: TreeNode, block: int) -> None:
        """Assign device block `block`, which has an owner, to `node`."""
        assert node.parent is not None
        self.allocator.cache(block)
        self._nodes[block] = node
        node.block = block
        node.parent.num_device_children += 1
        self.generation += 1

    def _keep_quota(self, space: Space, parent: TreeNode) -> bool:
        """Evict until the quota of `space` permits one more node, but never evict `parent`."""
        assert self.max_blocks_per_salt is not None
        parent.is_pinned = True
        while space.num_nodes >= self.max_blocks_per_salt:
            node = space.pop_unpinned()
            if node is None:
                break
            self._remove_subtree(node)
        parent.is_pinned = False
        return space.num_nodes < self.max_blocks_per_salt

    def _evict(self, node: TreeNode) -> None:
        """Free the device block of a leaf; keep the node if a host block is available."""
        self.stats.evicted_blocks += 1
        if self._has_host_room():
            assert self.host_allocator is not None
            (node.host_block,) = self.host_allocator.allocate(1)
            self._offloads[node.host_block] = node.block
            self.stats.offloaded_blocks += 1
            self._leave_device(node)
            self._offer(node)
        else:
            self._remove_subtree(node)

    def _has_host_room(self) -> bool:
        host = self.host_allocator
        return host is not None and (host.num_free > 0 or self.evict_host(1) > 0)

    def _leave_device(self, node: TreeNode) -> None:
        assert node.parent is not None
        del self._nodes[node.block]
        self.allocator.uncache(node.block)
        node.block = NO_BLOCK
        node.parent.num_device_children -= 1
        self.generation += 1
        self._offer(node.parent)

    def _free_host(self, node: TreeNode) -> None:
        assert self.host_allocator is not None
        self.host_allocator.free([node.host_block])
        # Cancel a pending copy into the block, which may be reused before the copy starts.
        self._offloads.pop(node.host_block, None)
        node.host_block = NO_BLOCK

    def _remove(self, node: TreeNode) -> None:
        """Remove a childless node from the tree and free its block."""
        parent = node.parent
        space = node.space
        assert parent is not None and not node.children
        if node.host_block != NO_BLOCK:
            self._free_host(node)
        if node.snapshot is not None:
            assert self.snapshots is not None
            self.snapshots.remove(node)
        del parent.children[node.chunk]
        space.num_nodes -= 1
        if node.block != NO_BLOCK:
            self._leave_device(node)
        else:
            self.generation += 1
            self._offer(parent)
        node.parent = None
        if not space.num_nodes and not any(root.is_pinned for root in space.roots.values()):
            del self._spaces[space.salt]

    def _remove_subtree(self, node: TreeNode) -> None:
        stack = [node]
        while stack:
            last = stack[-1]
            if last.parent is None:
                stack.pop()  # already removed
            elif last.children:
                stack.extend(last.children.values())
            else:
                self._remove(stack.pop())

    def walk(self, wants: Callable[[str | None], bool] = lambda _: True) -> list[TreeNode]:
        """Return all nodes, parents before their children; `wants` selects by cache salt."""
        nodes: list[TreeNode] = []
        stack = self._roots(wants)
        while stack:
            children = stack.pop().children.values()
            nodes.extend(children)
            stack.extend(children)
        return nodes

    def _roots(self, wants: Callable[[str | None], bool]) -> list[TreeNode]:
        spaces = [space for space in self._spaces.values() if wants(space.salt)]
        return [root for space in spaces for root in space.roots.values()]

    def first_nodes(self, limit: int, wants: Callable[[str | None], bool]) -> list[TreeNode]:
        """Return up to `limit` nodes, nearest to the roots first; `wants` selects by cache salt."""
        level = self._roots(wants)
        nodes: list[TreeNode] = []
        while level and len(nodes) < limit:
            below = (child for node in level for child in node.children.values())
            level = list(islice(below, limit - len(nodes)))
            nodes += level
        return nodes

    def check_integrity(self) -> None:
        """Check links, counts, quotas and the ownership invariant.

        Raises
        ------
        EngineError
            If one is violated; the message says which.
        """
        nodes = self.walk()
        check_tree(nodes, self.allocator, self.host_allocator, self._nodes)
        if self.snapshots is not None:
            self.snapshots.check_integrity(nodes)
        for space in self._spaces.values():
            quota = self.max_blocks_per_salt
            if quota is not None and space.salt is not None and space.num_nodes > quota:
                raise EngineError(
                    f"salt {space.salt!r} must hold at most {quota} blocks; got {space.num_nodes}"
                )


def _up_to_snapshot(found: PrefixMatch, ends: list[tuple[int, Snapshot]]) -> PrefixMatch:
    """Return the part of a match up to its last snapshot, and the rest of it as `beyond`."""
    if not ends:
        return PrefixMatch(beyond=found)
    num_blocks, snapshot = ends[-1]
    num_on_host = max(0, num_blocks - len(found.blocks))
    return PrefixMatch(
        found.blocks[:num_blocks], found.host_nodes[:num_on_host], snapshot, beyond=found
    )
