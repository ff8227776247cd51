"""Block ids of a fixed pool, and their reference counts.

Every block is in exactly one of three states,

    free         it has no owner, and its content is garbage
    referenced   it is in one or more block tables; its reference count is their number
    cached       it has no owner, but is in the prefix tree: it can be owned again (`acquire`) or
                 become free (`uncache`)

so `num_free + num_referenced + num_cached == num_blocks`, always.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from engine.errors import ContractError, EngineError, OutOfMemoryError

__all__ = ["BlockAllocator"]


class BlockAllocator:
    """Reference-counted block ids 0 .. num_blocks-1.

    Ids are handed out in a fixed order (ascending at first, then most recently freed first), so the
    same calls return the same ids.

    Parameters
    ----------
    num_blocks : int
        Size of the pool, at least 1.
    block_size : int
        Tokens per block (for errors only).

    Attributes
    ----------
    generations : list of int
        Generation of each block's content. It changes when the block becomes free, and by `renew`;
        records about a block's content are valid only for the generation they were made in.

    Examples
    --------
    >>> allocator = BlockAllocator(num_blocks=4, block_size=16)
    >>> table = allocator.allocate(2)
    >>> allocator.acquire(table[:1])            # a second owner of the first block
    >>> allocator.free(table)                   # one owner gone
    []
    >>> table, allocator.num_free, allocator.num_referenced
    ([0, 1], 3, 1)
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ContractError(
                f"num_blocks and block_size must be at least 1; got {num_blocks} and {block_size}"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_cached = 0
        self.generations = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._num_owners = [0] * num_blocks
        self._in_tree = bytearray(num_blocks)
        self._freed: list[int] | None = None

    @property
    def num_free(self) -> int:
        """Number of free blocks."""
        return len(self._free)

    @property
    def num_referenced(self) -> int:
        """Number of blocks in at least one block table."""
        return self.num_blocks - len(self._free) - self.num_cached

    def num_owners(self, block: int) -> int:
        """Return the number of owners of `block`."""
        return self._num_owners[block]

    def is_shared(self, block: int, *, readers: int = 0) -> bool:
        """Tell whether `block` has a reader besides its writer: another owner or the tree.

        `readers`: number of owners to ignore, because they read the block before the write.
        """
        return self._num_owners[block] - readers > 1 or bool(self._in_tree[block])

    def allocate(self, num_blocks: int) -> list[int]:
        """Allocate `num_blocks` free blocks, each with one owner.

        Raises
        ------
        OutOfMemoryError
            If fewer are free; nothing is allocated. Evict cached blocks from the tree first.
        """
        if num_blocks > len(self._free):
            raise OutOfMemoryError(
                f"{num_blocks} KV blocks of {self.block_size} tokens were requested, but only "
                f"{len(self._free)} of {self.num_blocks} are free ({self.num_referenced} in use, "
                f"{self.num_cached} cached)"
            )
        if num_blocks <= 0:
            return []
        if num_blocks == 1:  # fast path: a request has filled its last block
            blocks = [self._free.pop()]
            self._num_owners[blocks[0]] = 1
        else:
            blocks = self._free[: -num_blocks - 1 : -1]
            del self._free[-num_blocks:]
            for block in blocks:
                self._num_owners[block] = 1
        return blocks

    def acquire(self, blocks: Iterable[int]) -> None:
        """Add one owner to each of `blocks`, which must be referenced or cached."""
        owners = self._num_owners
        for block in blocks:
            if owners[block] == 0:
                if not self._in_tree[block]:
                    raise EngineError(f"block {block} is free and cannot be shared")
                self.num_cached -= 1
            owners[block] += 1

    def free(self, blocks: Iterable[int]) -> list[int]:
        """Remove one owner from each of `blocks`; return those that became cached.

        Raises
        ------
        EngineError
            If a block has no owner (a double free).
        """
        owners = self._num_owners
        cached = []
        for block in blocks:
            count = owners[block]
            if count == 0:
                raise EngineError(f"double free of block {block}: it has no owner")
            owners[block] = count - 1
            if count == 1:
                if self._in_tree[block]:
                    cached.append(block)
                else:
                    self._put_back(block)
        self.num_cached += len(cached)
        return cached

    def cache(self, block: int) -> None:
        """Mark a referenced `block` as a node of the tree."""
        if self._num_owners[block] == 0 or self._in_tree[block]:
            raise EngineError(f"block {block} is free or already in the tree")
        self._in_tree[block] = 1

    def uncache(self, block: int) -> None:
        """Mark `block` as no longer in the tree; without an owner it becomes free."""
        if not self._in_tree[block]:
            raise EngineError(f"block {block} is not in the tree")
        self._in_tree[block] = 0
        if self._num_owners[block] == 0:
            self.num_cached -= 1
            self._put_back(block)

    def renew(self, block: int) -> None:
        """Start a new generation of `block`: after a fork, its last owner goes on writing to it."""
        self.generations[block] += 1

    def record_freed(self) -> None:
        """Start recording the blocks that become free (debug mode)."""
        self._freed = []

    def take_freed(self) -> list[int]:
        """Return the blocks freed since the last call; empty unless they are recorded."""
        freed = self._freed or []
        if self._freed is not None:
            self._freed = []
        return freed

    def _put_back(self, block: int) -> None:
        self._free.append(block)
        self.generations[block] += 1
        if self._freed is not None:
            self._freed.append(block)

    def check_integrity(self, tables: Iterable[Iterable[int]] | None = None) -> None:
        """Check the states, and, if all block tables are given, every reference count.

        Raises
        ------
        EngineError
            If a block is inconsistent; the message names the first one.
        """
        free = Counter(self._free)
        cached = 0
        for block, count in enumerate(self._num_owners):
            in_tree = self._in_tree[block]
            cached += bool(in_tree and count == 0)
            if free[block] != (count == 0 and not in_tree):
                raise EngineError(
                    f"block {block} is {free[block]} times on the free list, with {count} owners "
                    f"and {'is' if in_tree else 'is not'} in the tree"
                )
        if cached != self.num_cached:
            raise EngineError(f"{cached} blocks are cached, but num_cached is {self.num_cached}")
        if tables is not None:
            self._check_owners(Counter(block for table in tables for block in table))

    def _check_owners(self, owners: Mapping[int, int]) -> None:
        for block, count in enumerate(self._num_owners):
            if owners.get(block, 0) != count:
                raise EngineError(
                    f"block {block} has {count} owners, but is in {owners.get(block, 0)} tables"
                )
