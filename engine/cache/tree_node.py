"""Parts of the prefix tree: nodes, the space of one cache salt, matches, statistics."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from engine.cache.lru import LruHeap
from engine.request import PrefixKey

__all__ = [
    "NO_BLOCK",
    "PrefixMatch",
    "Snapshot",
    "Space",
    "TreeNode",
    "TreeStats",
    "is_device_leaf",
    "is_host_leaf",
    "split_chunks",
]

NO_BLOCK = -1


class TreeNode:
    """One full block of tokens, following the tokens of its ancestors.

    Attributes
    ----------
    chunk : bytes
        The block's token ids.
    parent : TreeNode or None
        None for a root, and for a node that was removed.
    block, host_block : int
        Block id on the device or on the host; the unused one is NO_BLOCK (both for a root).
    num_device_children : int
        Number of children on the device.
    last_used : int
        The tree's clock when the last owner released the block.
    is_pinned : bool
        Whether the node is temporarily exempt from eviction.
    snapshot : Snapshot or None
        Recurrent states after the node's tokens.
    """

    __slots__ = (
        "block",
        "children",
        "chunk",
        "host_block",
        "is_pinned",
        "last_used",
        "num_device_children",
        "parent",
        "snapshot",
        "space",
    )

    def __init__(self, chunk: bytes, parent: TreeNode | None, space: Space, block: int) -> None:
        self.chunk = chunk
        self.parent = parent
        self.space = space
        self.block = block
        self.host_block = NO_BLOCK
        self.children: dict[bytes, TreeNode] = {}
        self.num_device_children = 0
        self.last_used = 0
        self.is_pinned = False
        self.snapshot: Snapshot | None = None


class Snapshot:
    """The states after all tokens of a node and its ancestors.

    Attributes
    ----------
    slot : int
        State slot.
    node : TreeNode or None
        None once the snapshot was evicted.
    last_used : int
        The cache's clock when it was taken or last read.
    """

    __slots__ = ("last_used", "node", "slot")

    def __init__(self, slot: int, node: TreeNode) -> None:
        self.slot = slot
        self.node: TreeNode | None = node
        self.last_used = 0


def is_device_leaf(node: TreeNode) -> bool:
    """Tell whether `node` is on the device and none of its children is."""
    return node.block != NO_BLOCK and not node.num_device_children


def is_host_leaf(node: TreeNode) -> bool:
    """Tell whether `node` is on the host and has no children."""
    return node.host_block != NO_BLOCK and node.block == NO_BLOCK and not node.children


class Space:
    """The trees of one cache salt: a root per key, a node count, and a separate eviction order."""

    def __init__(self, salt: str | None, can_evict: Callable[[TreeNode], bool]) -> None:
        self.salt = salt
        self.roots: dict[PrefixKey, TreeNode] = {}
        self.num_nodes = 0
        self.device_lru: LruHeap[TreeNode] = LruHeap(can_evict)
        self.host_lru: LruHeap[TreeNode] = LruHeap(is_host_leaf)

    def pop_unpinned(self) -> TreeNode | None:
        """Return the node to evict first: the oldest on the host, else on the device."""
        for lru in (self.host_lru, self.device_lru):
            kept = []
            node = lru.pop()
            while node is not None and node.is_pinned:
                kept.append(node)
                node = lru.pop()
            for pinned in kept:
                lru.push(pinned, self.num_nodes)
            if node is not None:
                return node
        return None


@dataclass(slots=True)
class PrefixMatch:
    """A cached prefix: blocks on the device, then nodes whose blocks are in host memory.

    Attributes
    ----------
    blocks, host_nodes : list of int, list of TreeNode
    snapshot : Snapshot or None
        For a model with states: its states after the prefix, which ends where they were taken.
    beyond : PrefixMatch or None
        For a model with states: the longer prefix whose blocks are cached, without states.
    """

    blocks: list[int] = field(default_factory=list)
    host_nodes: list[TreeNode] = field(default_factory=list)
    snapshot: Snapshot | None = None
    beyond: PrefixMatch | None = None

    @property
    def known(self) -> PrefixMatch:
        """The longest prefix whose blocks are cached, with or without states at its end."""
        return self.beyond or self

    @property
    def num_blocks(self) -> int:
        """Length of the prefix in blocks."""
        return len(self.blocks) + len(self.host_nodes)


@dataclass(slots=True)
class TreeStats:
    """Counters: tokens looked up, found on the device and on the host; blocks evicted."""

    queried_tokens: int = 0
    hit_tokens: int = 0
    host_hit_tokens: int = 0
    evicted_blocks: int = 0
    offloaded_blocks: int = 0


def split_chunks(token_ids: Sequence[int], block_size: int, num_chunks: int) -> Iterator[bytes]:
    """Yield the first `num_chunks` blocks of ids as bytes, which are compact and fast to compare.

    Examples
    --------
    >>> [len(chunk) for chunk in split_chunks(range(40), block_size=16, num_chunks=2)]
    [64, 64]
    """
    ids = array("i", token_ids[: num_chunks * block_size])
    data = ids.tobytes()
    width = block_size * ids.itemsize
    return (data[at : at + width] for at in range(0, num_chunks * width, width))
