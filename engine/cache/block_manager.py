"""Block tables of requests: growth, sharing, copy-on-write, release. Integers only.

The scheduler speaks to this class and never to the allocator. It moves no bytes: what has to be
copied is collected as block moves, which the scheduler hands to the runner with the step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.cache.block_allocator import BlockAllocator
from engine.errors import EngineError
from engine.request import Request

__all__ = ["BlockManager", "BlockMoves"]


@dataclass(slots=True)
class BlockMoves:
    """Copies of whole blocks that a step starts with, to be done in this order."""

    swap_out: list[tuple[int, int]] = field(default_factory=list)  # (device, host)
    copies: list[tuple[int, int]] = field(default_factory=list)  # (device, device)
    swap_in: list[tuple[int, int]] = field(default_factory=list)  # (host, device)


class BlockManager:
    """The block tables of all requests over one pool.

    Parameters
    ----------
    num_blocks, block_size : int
        The pool.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.allocator = BlockAllocator(num_blocks, block_size)
        self._moves = BlockMoves()

    @property
    def num_available(self) -> int:
        """Blocks that can be had without taking any from a request."""
        return self.allocator.num_free + self.allocator.num_cached

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def grow(self, request: Request, num_tokens: int, *, spare: int = 0) -> bool:
        """Make the table of `request` hold `num_tokens`, and its next slot writable.

        Returns False, and changes nothing, if that would leave fewer than `spare` blocks.
        """
        table = request.block_table
        num_new = max(0, self.num_blocks_for(num_tokens) - len(table))
        shared = self._shared_write_index(request)
        if num_new + (shared >= 0) + spare > self.num_available:
            return False
        if shared >= 0:
            self._copy_on_write(table, shared)
        if num_new:
            table.extend(self._take(num_new))
        request.shares_last_block = False
        return True

    def fork(self, parent: Request, child: Request) -> None:
        """Let `child`, which holds nothing, share the blocks of the tokens it begins with.

        Its tokens and those of `parent` must agree as far as the parent has committed them. Whole
        blocks are shared for good; a shared partial block is copied by whoever writes first.
        """
        shared = min(parent.num_committed_tokens, child.num_tokens - 1)
        if parent.token_ids(0, shared) != child.token_ids(0, shared) or child.block_table:
            raise EngineError(
                f"request {child.request_id!r} cannot share the blocks of {parent.request_id!r}: "
                f"its first {shared} tokens differ, or it holds blocks"
            )
        child.block_table = parent.block_table[: self.num_blocks_for(shared)]
        self.allocator.acquire(child.block_table)
        child.num_computed_tokens = child.num_committed_tokens = shared
        child.num_cached_tokens = shared
        parent.shares_last_block = child.shares_last_block = True

    def release(self, request: Request) -> None:
        """Take all blocks from `request`; nothing of it counts as computed any more."""
        table, request.block_table = request.block_table, []
        request.num_computed_tokens = request.num_committed_tokens = 0
        request.shares_last_block = False
        self.allocator.free(table)

    def take_moves(self) -> BlockMoves:
        """Return the moves collected since the last call."""
        moves, self._moves = self._moves, BlockMoves()
        return moves

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Verify the allocator against the tables, and that no writable block has two owners."""
        requests = list(requests)
        self.allocator.check_integrity(request.block_table for request in requests)
        for request in requests:
            first = request.num_computed_tokens // self.block_size
            for index in range(first, len(request.block_table)):
                block = request.block_table[index]
                is_marked = index == first and request.shares_last_block
                if self.allocator.is_shared(block) and not is_marked:
                    raise EngineError(
                        f"block {block} will be written by request {request.request_id!r}, but "
                        f"others read it"
                    )

    def _shared_write_index(self, request: Request) -> int:
        """Return where in the table the next token goes, if that block is shared; else -1."""
        if not request.shares_last_block:
            return -1
        index = request.num_computed_tokens // self.block_size
        table = request.block_table
        return index if index < len(table) and self.allocator.is_shared(table[index]) else -1

    def _copy_on_write(self, table: list[int], index: int) -> None:
        source, (table[index],) = table[index], self._take(1)
        self._moves.copies.append((source, table[index]))
        self.allocator.free([source])

    def _take(self, num_blocks: int) -> list[int]:
        return self.allocator.allocate(num_blocks)
