"""The invariants of the prefix tree, checked node by node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.cache.block_allocator import BlockAllocator
from engine.cache.tree_node import NO_BLOCK, TreeNode
from engine.errors import EngineError

__all__ = ["check_tree"]


def check_tree(
    nodes: Sequence[TreeNode],
    allocator: BlockAllocator,
    host_allocator: BlockAllocator | None,
    by_block: Mapping[int, TreeNode],
) -> None:
    """Check `nodes`, all nodes of one tree, against the allocators and the index of blocks.

    Raises
    ------
    EngineError
        If a node violates an invariant; the message names the first such node's block.
    """
    for node in nodes:
        _check_node(node, allocator, host_allocator)
    on_device = [node for node in nodes if node.block != NO_BLOCK]
    if len(on_device) != len(by_block) or any(by_block.get(n.block) is not n for n in on_device):
        raise EngineError("prefix tree: the index of device blocks differs from the nodes")
    num_cached = sum(allocator.num_owners(node.block) == 0 for node in on_device)
    if num_cached != allocator.num_cached:
        raise EngineError(
            f"prefix tree: {num_cached} blocks without owner, but num_cached={allocator.num_cached}"
        )
    hosts = [node.host_block for node in nodes if node.host_block != NO_BLOCK]
    if len(set(hosts)) != len(hosts):
        raise EngineError("prefix tree: two nodes share a host block")


def _check_node(
    node: TreeNode, allocator: BlockAllocator, host_allocator: BlockAllocator | None
) -> None:
    where = f"prefix tree: node of block {node.block} (host {node.host_block})"
    parent = node.parent
    if parent is None or parent.children.get(node.chunk) is not node:
        raise EngineError(f"{where} is not its parent's child")
    if (node.block == NO_BLOCK) == (node.host_block == NO_BLOCK):
        raise EngineError(f"{where} must be on exactly one of device and host")
    if node.is_pinned:
        raise EngineError(f"{where} is still pinned")
    count = sum(child.block != NO_BLOCK for child in node.children.values())
    if count != node.num_device_children:
        raise EngineError(f"{where} counts {node.num_device_children} device children, has {count}")
    if node.block == NO_BLOCK:
        if host_allocator is None or host_allocator.num_owners(node.host_block) != 1:
            raise EngineError(f"{where} does not own its host block")
        return
    if parent.parent is None:
        return
    if parent.block == NO_BLOCK:
        raise EngineError(f"{where} is on the device, but its parent is not")
    if allocator.num_owners(node.block) and not allocator.num_owners(parent.block):
        raise EngineError(f"{where} is owned, but its parent is not")
