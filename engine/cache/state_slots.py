"""State slots of requests: allocation, rollback of drafts, snapshots, swap and fork.

A slot holds the states of all recurrent layers of one sequence, after a known number of its tokens.
A running request owns the slot that its next step reads. The step writes to the same slot, unless
its old content is still needed:

    prefix hit     read the snapshot in the tree, write to the request's own slot
    snapshot       a decode that starts at a snapshot's position leaves its slot behind, and goes on
                   in another one; a prefill writes a copy at that position
    drafts         write one slot for each token; the one after the last accepted draft is kept

So no state is ever copied, except for a fork. Ids of slots are those of a `BlockAllocator`: free,
referenced, or cached (a snapshot without a reader, which is evicted when a slot is needed).
Snapshots not yet in the tree and slots of drafts are *extra*; there are at most as many as leave a
slot for each of the requests that may run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.cache.block_allocator import BlockAllocator
from engine.cache.prefix_tree import PrefixTree
from engine.cache.snapshots import SnapshotCache
from engine.cache.tree_node import PrefixMatch
from engine.errors import EngineError
from engine.request import NO_SLOT, Request, RequestState

__all__ = ["SlotMoves", "StateAccess", "StateSlots"]

Pairs = list[tuple[int, int]]


class StateAccess(NamedTuple):
    """The slots that one sequence of a step reads and writes.

    Attributes
    ----------
    request : Request
    source : int
        Slot read, if the sequence has earlier tokens.
    targets : tuple of int
        Slot written after the last token; with drafts, the slot written after each token.
    snapshot, snapshot_len : int
        Slot that also receives the states after the first `snapshot_len` tokens of the request;
        NO_SLOT: none.
    """

    request: Request
    source: int
    targets: tuple[int, ...]
    snapshot: int = NO_SLOT
    snapshot_len: int = 0


@dataclass(slots=True)
class SlotMoves:
    """Copies of slots that precede a step, in this order, and the slots that the step holds."""

    swap_out: Pairs = field(default_factory=list)  # (device, host)
    copies: Pairs = field(default_factory=list)  # (device, device)
    swap_in: Pairs = field(default_factory=list)  # (host, device)
    reads: list[int] = field(default_factory=list)  # slots with one more owner until it has ended
    freed: list[int] = field(default_factory=list)  # debug mode: slots to be poisoned

    def __bool__(self) -> bool:
        return bool(self.swap_out or self.copies or self.swap_in or self.reads)


class StateSlots:
    """The slots of all requests, and the snapshots among them.

    Parameters
    ----------
    num_slots, num_requests : int
        Slots on the device, and the number of requests that may run: each has a slot.
    num_host_slots : int
        Slots in host memory, for swapped requests.
    tree : PrefixTree or None
        Receives the snapshots; None takes none.
    grid : int
        Snapshots are taken at multiples of this number of tokens: a multiple of the block size, and
        of the chunks in which recurrent layers compute a prompt.
    interval : int
        Distance of the snapshots along a prompt, in tokens; 0 takes none but the others.

    Attributes
    ----------
    allocator, host_allocator : BlockAllocator, BlockAllocator or None
    """

    def __init__(
        self,
        num_slots: int,
        num_requests: int,
        *,
        num_host_slots: int = 0,
        tree: PrefixTree | None = None,
        grid: int = 64,
        interval: int = 4096,
    ) -> None:
        self.allocator = BlockAllocator(num_slots, 1)
        self.host_allocator = BlockAllocator(num_host_slots, 1) if num_host_slots else None
        self.grid = grid
        self._interval = -(-interval // grid) * grid
        self._num_spare = num_slots - num_requests
        self._num_own = 0  # requests that hold a slot
        self._tree = tree
        self._moves = SlotMoves()
        if tree is not None:
            tree.snapshots = SnapshotCache(self.allocator)

    # ---- a request starts and ends

    def admit(self, request: Request, found: PrefixMatch) -> bool:
        """Give `request` a slot, to continue from the snapshot of `found` or from its host slot.

        Returns False, and changes nothing, if no slot can be had.
        """
        snapshot = found.snapshot
        if snapshot is not None:
            self.allocator.acquire([snapshot.slot])  # so that it is not evicted now
        slot = self._take()
        if slot == NO_SLOT:
            if snapshot is not None:
                self._release([snapshot.slot])
            return False
        state = request.state
        if state is not None:  # swapped
            self._moves.swap_in.append((state.host_slot, slot))
            state.slot = slot
            state.host_slot = NO_SLOT
            if snapshot is not None:
                self._release([snapshot.slot])
        else:
            state = request.state = RequestState(slot)
            if snapshot is not None:
                state.source = snapshot.slot
                self._moves.reads.append(snapshot.slot)
            state.wanted = self._wanted(request, found)
        self._num_own += 1
        return True

    def can_fork(self, parent: Request, num_tokens: int) -> bool:
        """Tell whether the state of `parent` is the one after `num_tokens`, and a slot is free."""
        state = parent.state
        return (
            state is not None
            and state.slot != NO_SLOT
            and not state.drafted
            and parent.num_computed_tokens == num_tokens
            and self.allocator.num_free + self.allocator.num_cached > 0
        )

    def fork(self, parent: Request, child: Request) -> None:
        """Give `child` a copy of the state of `parent`; `can_fork` must hold."""
        assert parent.state is not None
        slot = self._take()
        child.state = RequestState(slot)
        self._num_own += 1
        # A copy that the parent still waits for is not its source: copies run in no order.
        pending = {target: source for source, target in self._moves.copies}
        source = pending.get(parent.state.slot, parent.state.current)
        self.allocator.acquire([source])  # until it is copied
        self._moves.reads.append(source)
        self._moves.copies.append((source, slot))

    def release(self, request: Request) -> None:
        """Free the slots of `request`."""
        state = request.state
        if state is None:
            return
        request.state = None
        if state.host_slot != NO_SLOT:
            assert self.host_allocator is not None
            self.host_allocator.free([state.host_slot])
        if state.slot != NO_SLOT:
            self._num_own -= 1
            copies = self._moves.copies  # one that would fill the slot may no longer do so
            self._moves.copies = [pair for pair in copies if pair[1] != state.slot]
            self._release(state.held)

    # ---- a step

    def fit_chunk(self, request: Request, num_tokens: int) -> int:
        """Return how many of the next `num_tokens` of `request` its next chunk may have.

        A chunk takes one snapshot. All but the last end on the grid, so that where they end does
        not depend on the other requests.
        """
        state = request.state
        if state is None:
            return num_tokens
        start = request.num_computed_tokens
        stop = start + num_tokens
        if len(state.wanted) > 1 and state.wanted[1] <= stop:
            stop = state.wanted[0]
        if stop < request.num_tokens and stop // self.grid * self.grid > start:
            stop = stop // self.grid * self.grid
        return stop - start

    def reserve_drafts(self, request: Request, num_drafts: int) -> bool:
        """Allocate the slots in which the next step leaves a state for each draft of `request`."""
        state = request.state
        assert state is not None
        if state.source == NO_SLOT:
            before = state.slot
            self._leave_behind(request, request.num_computed_tokens)
            if state.slot != before:
                state.source = before
                state.is_new = True
        slots = self._take_extra(num_drafts)
        if slots:
            state.drafted = (state.slot, *slots)
        return bool(slots)

    def access(self, request: Request, start: int, num_tokens: int) -> StateAccess:
        """Return what a step that computes tokens [start, start + num_tokens) reads and writes.

        A decode need not ask unless it starts on the grid or `RequestState.is_new`: it continues in
        the slot of its last step.
        """
        state = request.state
        assert state is not None
        source = state.current
        state.source = NO_SLOT
        state.is_new = False
        if state.drafted:
            return StateAccess(request, source, state.drafted)
        if state.wanted and state.wanted[0] <= start + num_tokens:
            length = state.wanted.pop(0)
            if slots := self._take_extra(1):
                state.snapshots.append((length, slots[0]))
                return StateAccess(request, source, (state.slot,), slots[0], length)
        elif source == state.slot and num_tokens == 1:
            self._leave_behind(request, start)
        return StateAccess(request, source, (state.slot,))

    def accept(self, request: Request, start: int, num_accepted: int) -> None:
        """Keep the state after `num_accepted` drafts, which follow the token at `start`."""
        state = request.state
        assert state is not None
        kept = state.drafted[num_accepted]
        others = {*state.drafted} - {kept}
        border = (start + num_accepted) // self.grid * self.grid
        if self._tree is not None and border > max(start, request.num_prompt_tokens - 1):
            slot = state.drafted[border - start - 1]
            others.discard(slot)
            others.update(slot for _, slot in self._take_older(request))
            state.snapshots.append((border, slot))
        self._release(sorted(others))
        state.is_new = kept != state.slot
        state.slot = kept
        state.drafted = ()

    def keep_snapshots(self, request: Request, *, leaving: bool) -> None:
        """Move the snapshots of committed tokens to the tree.

        One taken while decoding goes there only when the request is `leaving`: later ones replace
        it until then.
        """
        state = request.state
        if state is None or not state.snapshots:
            return
        num_known = min(request.num_committed_tokens, request.num_known_tokens)
        stop = num_known if leaving else min(num_known, request.num_prompt_tokens - 1)
        kept: Pairs = []
        for length, slot in state.snapshots:
            if length > stop:
                kept.append((length, slot))
                continue
            assert self._tree is not None
            node = self._tree.node_at(request.token_ids(0, length), request.prefix_key)
            if node is None or node.snapshot is not None:
                self._release([slot])
            else:
                self._tree.put_snapshot(node, slot)
        state.snapshots = kept

    # ---- swap

    def can_swap_out(self, request: Request) -> bool:
        """Tell whether the state of `request` is known, and fits in host memory."""
        state = request.state
        host = self.host_allocator
        if state is None or state.drafted or host is None or not host.num_free:
            return False
        # A fork whose state is yet to be copied: swapping out comes first.
        return all(target != state.slot for _, target in self._moves.copies)

    def num_lost(self, request: Request) -> int:
        """Return how many computed tokens `request` computes anew if its slots are released."""
        state = request.state
        if self._tree is None or state is None:
            return request.num_computed_tokens
        taken = [length for length, _ in state.snapshots if length <= request.num_committed_tokens]
        in_prompt = min(request.num_prompt_tokens - 1, request.num_computed_tokens)
        kept = max(taken, default=in_prompt // self.grid * self.grid)
        return max(0, request.num_computed_tokens - kept)

    def swap_out(self, request: Request) -> None:
        """Move the state of `request` to the host; drop its snapshots."""
        state = request.state
        assert state is not None and self.host_allocator is not None
        (host_slot,) = self.host_allocator.allocate(1)
        self._moves.swap_out.append((state.current, host_slot))
        self._num_own -= 1
        self._release(state.held)
        request.state = RequestState(NO_SLOT, wanted=state.wanted, host_slot=host_slot)

    # ---- moves

    @property
    def has_moves(self) -> bool:
        """Tell whether moves were collected since the last `take_moves`."""
        return bool(self._moves)

    def take_moves(self) -> SlotMoves:
        """Return the moves collected since the last call."""
        moves = self._moves
        self._moves = SlotMoves()
        filled = {slot for pairs in (moves.copies, moves.swap_in) for _, slot in pairs}
        moves.freed = sorted(set(self.allocator.take_freed()) - filled)
        return moves

    def settle(self, moves: SlotMoves) -> None:
        """Free what a step with these moves has held, now that it has ended."""
        self._release(moves.reads)
        if self.host_allocator is not None:
            self.host_allocator.free(host for host, _ in moves.swap_in)

    def check_integrity(
        self, requests: Iterable[Request], in_flight: Iterable[SlotMoves] = ()
    ) -> None:
        """Check that each slot has the owners that requests, steps and snapshots account for.

        Parameters
        ----------
        requests : iterable of Request
            All unfinished requests.
        in_flight : iterable of SlotMoves
            Moves of the steps not yet settled.

        Raises
        ------
        EngineError
            If one has not, or a request lacks a slot.
        """
        states = [request.state for request in requests if request.state is not None]
        held = [state.held for state in states]
        in_flight = list(in_flight)
        reads = [moves.reads for moves in (*in_flight, self._moves)]
        self.allocator.check_integrity([*held, *reads])
        if self.host_allocator is not None:
            hosts = [state.host_slot for state in states if state.host_slot != NO_SLOT]
            hosts += [host for moves in (*in_flight, self._moves) for host, _ in moves.swap_in]
            self.host_allocator.check_integrity([hosts])
        num_own = sum(state.slot != NO_SLOT for state in states)
        num_extra = sum(map(len, held)) - num_own
        if num_own != self._num_own or num_extra > self._num_spare:
            raise EngineError(
                f"{num_own} requests hold a slot and {num_extra} extra ones; counted "
                f"{self._num_own}, with room for {self._num_spare} extra ones"
            )

    # ---- helpers

    def _wanted(self, request: Request, found: PrefixMatch) -> list[int]:
        """Return the positions at which the prompt of `request` takes snapshots, ascending.

        They are the last one on the grid before its last token, where another prompt of the same
        beginning would continue; the end of the known prefix, where earlier prompts part from this
        one; and every `interval` tokens.
        """
        if self._tree is None:
            return []
        size = self._tree.block_size
        start = found.num_blocks * size
        last = (request.num_tokens - 1) // self.grid * self.grid
        parting = found.known.num_blocks * size // self.grid * self.grid
        along = range(0, last, self._interval) if self._interval else ()
        return sorted({p for p in (last, min(parting, last), *along) if p > start})

    def _leave_behind(self, request: Request, start: int) -> None:
        """Keep the state after `start` tokens as a snapshot, and go on in another slot."""
        state = request.state
        assert state is not None
        if self._tree is None or start % self.grid or start < request.num_prompt_tokens:
            return
        slots = [slot for _, slot in self._take_older(request)]
        # A request holds this slot to its end: leave half of them for drafts and prompts.
        slots = slots or self._take_extra(1, most=(self._num_spare + 1) // 2)
        if slots:
            state.snapshots.append((start, state.slot))
            state.slot = slots.pop()
        self._release(slots)

    def _take_older(self, request: Request) -> Pairs:
        """Remove and return the snapshots beyond the prompt, which a newer one replaces."""
        state = request.state
        assert state is not None
        older = [pair for pair in state.snapshots if pair[0] >= request.num_prompt_tokens]
        state.snapshots = [pair for pair in state.snapshots if pair not in older]
        return older

    def _take(self) -> int:
        """Return a slot with one owner, evicting a snapshot if needed; NO_SLOT if none is left."""
        is_free = self.allocator.num_free > 0 or (
            self._tree is not None and self._tree.evict_snapshot()
        )
        return self.allocator.allocate(1)[0] if is_free else NO_SLOT

    def _take_extra(self, count: int, most: int | None = None) -> list[int]:
        """Return `count` slots besides those that requests need to run; [] if they do not fit.

        `most`: number of such slots to reach at most; by default as many as there are.
        """
        num_extra = self.allocator.num_referenced - self._num_own
        room = self.allocator.num_free + self.allocator.num_cached
        if num_extra + count > (self._num_spare if most is None else most) or count > room:
            return []
        return [self._take() for _ in range(count)]

    def _release(self, slots: Iterable[int]) -> None:
        if self._tree is not None and self._tree.snapshots is not None:
            self._tree.snapshots.release(slots)
        else:
            self.allocator.free(slots)
