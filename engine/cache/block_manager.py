"""Block tables of requests: admission, growth, sharing, copy-on-write, swap.

The scheduler calls this class, never the allocator or the tree. No bytes are moved here: copies are
collected as block moves, which the scheduler passes to the runner with the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from engine.cache.block_allocator import BlockAllocator
from engine.cache.prefix_tree import PrefixTree
from engine.cache.state_slots import SlotMoves, StateSlots
from engine.cache.tree_node import NO_BLOCK, PrefixMatch
from engine.errors import EngineError, RequestError
from engine.request import Request

__all__ = ["BlockManager", "BlockMoves"]


@dataclass(slots=True)
class BlockMoves:
    """Copies of whole blocks at the start of a step, executed in this order."""

    swap_out: list[tuple[int, int]] = field(default_factory=list)  # (device, host)
    copies: list[tuple[int, int]] = field(default_factory=list)  # (device, device)
    swap_in: list[tuple[int, int]] = field(default_factory=list)  # (host, device)


class BlockManager:
    """The block tables of all requests over one pool, one prefix tree and one host pool.

    Parameters
    ----------
    num_blocks, block_size : int
        Size of the device pool, and tokens per block.
    num_host_blocks : int
        Blocks in host memory, for swapped requests and evicted prefixes; may be 0.
    prefix_caching : bool
        Whether computed prefixes are kept in a tree and shared.
    max_blocks_per_salt : int, optional
        Maximum number of blocks that the tree keeps per cache salt.
    states : callable, optional
        Builds the `StateSlots` of a model with recurrent layers, given the tree.

    Attributes
    ----------
    states : StateSlots or None
        State slots, if the model has recurrent layers.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        num_host_blocks: int = 0,
        prefix_caching: bool = True,
        max_blocks_per_salt: int | None = None,
        states: Callable[[PrefixTree | None], StateSlots] | None = None,
    ) -> None:
        self.block_size = block_size
        self.allocator = BlockAllocator(num_blocks, block_size)
        self.host_allocator = (
            BlockAllocator(num_host_blocks, block_size) if num_host_blocks else None
        )
        self.tree = (
            PrefixTree(
                self.allocator,
                max_blocks_per_salt=max_blocks_per_salt,
                host_allocator=self.host_allocator,
            )
            if prefix_caching
            else None
        )
        self.states = None if states is None else states(self.tree)
        self._moves = BlockMoves()
        self._copied: list[int] = []
        self._lengths: dict[Request, int] = {}
        self._lengths_generation = -1
        self._last_match: tuple[Request, tuple[int, int], PrefixMatch] | None = None

    @property
    def num_available(self) -> int:
        """Number of blocks available without preempting a request: free plus cached."""
        return self.allocator.num_free + self.allocator.num_cached

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that `num_tokens` tokens occupy."""
        return -(-num_tokens // self.block_size)

    # ---- allocation

    def match(self, request: Request) -> PrefixMatch:
        """Return the cached prefix of `request`; its last token, always computed, is excluded."""
        if self.tree is None or not request.reuse_prefix:
            return PrefixMatch()
        # Memoised: the head of the queue is looked up in every step until it is admitted.
        last = self._last_match
        state = (self.tree.generation, request.num_tokens)
        if last is not None and last[0] is request and last[1] == state:
            return last[2]
        num_tokens = (request.num_tokens - 1) // self.block_size * self.block_size
        found = self.tree.match(request.token_ids(0, num_tokens), request.prefix_key)
        self._last_match = (request, state, found)
        return found

    def match_length(self, request: Request) -> int:
        """Return the length in blocks of the cached prefix of `request` (memoised)."""
        if self.tree is None:
            return 0
        if self._lengths_generation != self.tree.generation:
            self._lengths_generation = self.tree.generation
            self._lengths.clear()
        if request not in self._lengths:
            self._lengths[request] = self.match(request).num_blocks
        return self._lengths[request]

    def admit(self, request: Request, *, spare: int = 0) -> bool:
        """Allocate blocks for all tokens of `request`, which holds no device blocks yet.

        Cached blocks are shared, and swapped-out blocks are swapped in; both count as computed.
        Returns False, and changes nothing, if fewer than `spare` blocks would remain.
        """
        found = self.match(request)
        is_swapped = bool(request.host_block_table)
        shared = found.blocks
        if is_swapped:
            shared = found.known.blocks[: request.num_committed_tokens // self.block_size]
        num_new = self.num_blocks_for(request.num_tokens) - len(shared)
        num_revived = sum(not self.allocator.num_owners(block) for block in shared)
        if num_new + num_revived + spare > self.num_available:
            return False
        if self.states is not None and not self.states.admit(request, found):
            return False
        nodes = [] if is_swapped else found.host_nodes
        for node in nodes:
            node.is_pinned = True  # `_take` may evict, but not the nodes about to be loaded
        self.allocator.acquire(shared)
        new = self._take(num_new)
        request.block_table = [*shared, *new]
        request.num_tree_blocks = len(shared) + len(nodes)
        for node in nodes:
            node.is_pinned = False
        if is_swapped:
            self._bring_back(request, len(shared))
        else:
            request.choose_rope()
            self._use_prefix(request, found, new)
        return True

    def lacks_block(self, request: Request) -> bool:
        """Tell whether the next token of `request` needs a block, or may need a copy of one."""
        num_slots = len(request.block_table) * self.block_size
        return request.shares_last_block or request.num_computed_tokens >= num_slots

    def grow(self, request: Request, num_tokens: int, *, spare: int = 0) -> bool:
        """Grow the table of `request` to hold `num_tokens`, and make its next slot writable.

        Returns False, and changes nothing, if it would leave fewer than `spare` blocks available.
        """
        table = request.block_table
        if not request.shares_last_block and num_tokens <= len(table) * self.block_size:
            return True
        num_new = max(0, -(-num_tokens // self.block_size) - len(table))
        index = request.num_computed_tokens // self.block_size  # the block to write next
        is_continued = request.shares_last_block and index < len(table)
        is_copied = is_continued and self._is_shared(table[index])
        num_taken = num_new + is_copied
        if num_taken and num_taken + spare > self.num_available:
            return False
        if is_copied:
            self._copy_on_write(table, index)
        elif is_continued:
            self.allocator.renew(table[index])
        if num_new:
            table.extend(self._take(num_new))
        request.shares_last_block = False
        return True

    def can_fork_state(self, parent: Request, child: Request) -> bool:
        """Tell whether `child` can continue from a copy of `parent`'s state, if there is one.

        A state cannot be rolled back: `parent` must have computed just the tokens they share.
        """
        shared = min(parent.num_committed_tokens, child.num_tokens - 1)
        return self.states is None or self.states.can_fork(parent, shared)

    def fork(self, parent: Request, child: Request) -> None:
        """Let `child`, which holds no blocks, share `parent`'s blocks of their common tokens.

        Its tokens must equal the committed tokens of `parent`. Full blocks stay shared; a shared
        partial block is copied before the first write.

        Raises
        ------
        RequestError
            If the tokens differ or the child holds blocks.
        """
        shared = self.check_fork(parent, child)
        child.choose_rope()
        child.block_table = parent.block_table[: self.num_blocks_for(shared)]
        self.allocator.acquire(child.block_table)
        if self.states is not None:
            self.states.fork(parent, child)
        child.num_computed_tokens = child.num_committed_tokens = shared
        child.num_cached_tokens = min(shared, child.num_prompt_tokens)
        child.num_tree_blocks = min(parent.num_tree_blocks, shared // self.block_size)
        parent.shares_last_block = child.shares_last_block = True

    def check_fork(self, parent: Request, child: Request) -> int:
        """Return the number of tokens `child` would share with `parent`; raise if they differ."""
        shared = min(parent.num_committed_tokens, child.num_tokens - 1)
        differs = parent.token_ids(0, shared) != child.token_ids(0, shared)
        if differs or parent.prefix_key != child.prefix_key or child.block_table:
            raise RequestError(
                f"request {child.request_id!r} must agree with its parent {parent.request_id!r} in "
                f"its first {shared} tokens, cache salt, LoRA adapter and rope, and hold no "
                "blocks; it does not"
            )
        return shared

    # ---- caching, release and swap

    def cache_prefix(self, request: Request, *, leaving: bool = False) -> None:
        """Insert the full blocks of committed tokens into the tree, for others to share."""
        if self.tree is None:
            return
        self._insert(self.tree, request, leaving=leaving)
        if self.states is not None:
            self.states.keep_snapshots(request, leaving=leaving)

    def _insert(self, tree: PrefixTree, request: Request, *, leaving: bool) -> None:
        size = self.block_size
        start = request.num_tree_blocks
        num_full = min(request.num_committed_tokens, request.num_known_tokens) // size
        if num_full <= start:
            return
        if start and not tree.has_block(request.block_table[start - 1]):
            start = 0  # the tree was reset in the meantime
        request.num_tree_blocks = tree.insert(
            request.token_ids(start * size, num_full * size),
            request.block_table,
            request.prefix_key,
            start=start,
            leaving=leaving,
        )

    def release(self, request: Request, *, keep: bool = True) -> None:
        """Release all blocks of `request`; none of its tokens count as computed any more.

        With `keep`, its computed blocks stay in the tree, where any request may match them.
        """
        if keep and request.block_table:
            self.cache_prefix(request, leaving=True)
        self._free_table(request)
        if self.states is not None:
            self.states.release(request)
        request.num_computed_tokens = request.num_committed_tokens = 0
        if request.host_block_table:
            assert self.host_allocator is not None
            self.host_allocator.free(request.host_block_table)
            request.host_block_table = []

    def can_swap_out(self, request: Request) -> bool:
        """Tell whether the computed blocks of `request` fit in host memory, and are of use there.

        Those of a request that ends now, or needs other rope factors, are not.
        """
        if self.host_allocator is None or request.num_tokens >= request.pause_len:
            return False
        if self.states is not None and not self.states.can_swap_out(request):
            return False
        room = self.host_allocator.num_free + (self.tree.num_host_nodes if self.tree else 0)
        return 0 < self.num_blocks_for(request.num_computed_tokens) <= room

    def swap_out(self, request: Request) -> None:
        """Release all device blocks of `request`, and collect their copies to the host.

        Its tokens still count as computed; `admit` swaps its blocks in.
        """
        assert self.host_allocator is not None
        num_blocks = self.num_blocks_for(request.num_computed_tokens)
        lacking = num_blocks - self.host_allocator.num_free
        if lacking > 0 and self.tree is not None:
            self.tree.evict_host(lacking)
        request.host_block_table = self.host_allocator.allocate(num_blocks)
        pairs = zip(request.block_table[:num_blocks], request.host_block_table, strict=True)
        self._moves.swap_out.extend(pairs)
        self._free_table(request)
        if self.states is not None:
            self.states.swap_out(request)

    def reset_prefixes(self) -> int:
        """Drop all cached prefixes; return the number of blocks freed, on device and host.

        Blocks in the tables of requests stay there.
        """
        if self.tree is None:
            return 0
        before = self._num_free
        self.tree.reset()
        return self._num_free - before

    @property
    def _num_free(self) -> int:
        host = self.host_allocator
        return self.allocator.num_free + (0 if host is None else host.num_free)

    # ---- moves

    @property
    def has_moves(self) -> bool:
        """Tell whether moves were collected since the last `take_moves`."""
        moves = self._moves
        tree = self.tree
        has_offloads = tree is not None and tree.has_offloads
        return bool(moves.swap_out or moves.copies or moves.swap_in or has_offloads)

    def take_moves(self) -> BlockMoves:
        """Return the moves collected since the last call."""
        moves = self._moves
        self._moves = BlockMoves()
        self._free(self._copied)
        self._copied = []
        if self.tree is not None:
            moves.swap_out.extend(self.tree.take_offloads())
        return moves

    def record_freed(self) -> None:
        """Start recording the blocks and slots that become free (debug mode)."""
        self.allocator.record_freed()
        if self.states is not None:
            self.states.allocator.record_freed()

    def take_freed(self, copies: Iterable[tuple[int, int]]) -> list[int]:
        """Return the blocks freed since the last call, except copy targets (debug mode)."""
        filled = {block for _, block in copies}
        return sorted(set(self.allocator.take_freed()) - filled)

    def settle(
        self, swap_in: Iterable[tuple[int, int]], slot_moves: SlotMoves | None = None
    ) -> None:
        """Free the host blocks of a step's `swap_in`, which the step has read, and its slots."""
        if self.host_allocator is not None:
            self.host_allocator.free(host for host, _ in swap_in)
        if self.states is not None and slot_moves is not None:
            self.states.settle(slot_moves)

    def drop_uncopied(self, moves: BlockMoves) -> None:
        """Drop the prefixes copied by `moves` of a failed step: the copies may be incomplete."""
        if self.tree is not None:
            self.tree.forget(
                (device for _, device in moves.swap_in), (host for _, host in moves.swap_out)
            )

    def check_integrity(
        self,
        requests: Iterable[Request],
        host_in_flight: Iterable[int] = (),
        slots_in_flight: Iterable[SlotMoves] = (),
    ) -> None:
        """Check allocators and tree against the tables, and that no block to be written is shared.

        Parameters
        ----------
        requests : iterable of Request
            All unfinished requests.
        host_in_flight : iterable of int
            Host blocks in the `swap_in` of steps not yet settled.
        slots_in_flight : iterable of SlotMoves
            Moves of state slots of these steps.
        """
        requests = list(requests)
        self.allocator.check_integrity(request.block_table for request in requests)
        nodes = []
        if self.tree is not None:
            self.tree.check_integrity()
            nodes = [n.host_block for n in self.tree.walk() if n.host_block != NO_BLOCK]
        if self.host_allocator is not None:
            tables = [request.host_block_table for request in requests]
            self.host_allocator.check_integrity([*tables, nodes, host_in_flight])
        if self.states is not None:
            self.states.check_integrity(requests, slots_in_flight)
        for request in requests:
            self._check_writable(request)

    # ---- helpers

    def _use_prefix(self, request: Request, found: PrefixMatch, new: list[int]) -> None:
        """Count a match as computed, and load its blocks from the host."""
        num_tokens = found.num_blocks * self.block_size
        request.num_computed_tokens = request.num_committed_tokens = num_tokens
        if not request.num_restarts:  # else these may be tokens that it computed itself
            request.num_cached_tokens = min(num_tokens, request.num_prompt_tokens)
        if self.tree is None:
            return
        nodes = found.host_nodes
        self._moves.swap_in.extend(self.tree.load(nodes, new[: len(nodes)]))
        if request.reuse_prefix:
            stats = self.tree.stats
            stats.queried_tokens += request.num_tokens
            stats.hit_tokens += num_tokens
            stats.host_hit_tokens += len(nodes) * self.block_size

    def _bring_back(self, request: Request, num_shared: int) -> None:
        """Collect the copies of a swapped request's blocks that are not in the tree."""
        assert self.host_allocator is not None
        host = request.host_block_table
        request.host_block_table = []
        table = request.block_table[num_shared : len(host)]
        self._moves.swap_in.extend(zip(host[num_shared:], table, strict=True))
        self.host_allocator.free(host[:num_shared])

    def _is_shared(self, block: int) -> bool:
        """Tell whether `block` has readers other than pending copies, which precede any write."""
        return self.allocator.is_shared(block, readers=self._copied.count(block))

    def _copy_on_write(self, table: list[int], index: int) -> None:
        source = table[index]
        (table[index],) = self._take(1)
        self._moves.copies.append((source, table[index]))
        # Keep an owner until the moves are taken: another move could overwrite a free block first.
        self._copied.append(source)

    def _take(self, num_blocks: int) -> list[int]:
        lacking = num_blocks - self.allocator.num_free
        if lacking > 0 and self.tree is not None:
            self.tree.evict(lacking)
        return self.allocator.allocate(num_blocks)

    def _free_table(self, request: Request) -> None:
        table = request.block_table
        request.block_table = []
        request.num_tree_blocks = 0
        request.shares_last_block = False
        self._free(table)

    def _free(self, blocks: list[int]) -> None:
        if self.tree is not None:
            self.tree.release(blocks)
        else:
            self.allocator.free(blocks)

    def _check_writable(self, request: Request) -> None:
        """Check that the blocks `request` will write are its own or marked for copy-on-write."""
        first = request.num_computed_tokens // self.block_size
        for index in range(first, len(request.block_table)):
            block = request.block_table[index]
            is_marked = index == first and request.shares_last_block
            if self.allocator.is_shared(block) and not is_marked:
                raise EngineError(
                    f"block {block} will be written by request {request.request_id!r}, but "
                    f"others read it"
                )
