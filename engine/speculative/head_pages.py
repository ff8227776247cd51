"""KV pages of a draft head: the keys it has computed, under the target's block ids.

A head has its own slab, indexed by the target's block ids. It can compute a token's key only from
the target's features of that token, in the step that computes them. Keys not computed then stay
missing: those of a cached prefix, of swapped or copied blocks, and of tokens decoded without
drafts. So, unlike a draft model (`DraftPages`), a head cannot catch up.

Rule: a head attends to exactly the keys it has. A request's keys are packed one after another into
some of its blocks, leaving no room for missing ones, and are rotated by their tokens' positions. A
full block without gaps is recorded with its generation (`BlockAllocator.generations`), and requests
that match it as a cached prefix attend to it too. Its last key was computed with the token that
followed at that time, which may differ now. A wrong or missing key can only make drafts worse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.request import Request

__all__ = ["HeadPages", "HeadSequence"]


@dataclass(slots=True)
class _Block:
    """A block that holds keys of one request."""

    block: int
    index: int  # index in the request's block table
    generation: int
    first: int  # token position of its first key
    is_exact: bool  # each key is at the same offset as in the target's block, without gaps


@dataclass(slots=True)
class HeadSequence:
    """A head's keys of one request.

    Attributes
    ----------
    num_keys : int
        Number of keys.
    next_position : int
        Token position that follows the last key's.
    """

    num_keys: int = 0
    next_position: int = 0
    num_restarts: int = 0  # `Request.num_restarts` when the blocks were last checked
    blocks: list[_Block] = field(default_factory=list)

    @property
    def table(self) -> list[int]:
        """Block table of the keys: key i is in the block at index i // block_size."""
        return [entry.block for entry in self.blocks]


class HeadPages:
    """The head's blocks of all requests.

    Parameters
    ----------
    block_size : int
    generations : sequence of int
        The allocator's live list, indexed by block.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> rules = SimpleNamespace(max_tokens=1, min_tokens=0, ignore_eos=False, stop_token_ids=None)
    >>> one, two = (Request(name, list(range(40)), rules) for name in ("one", "two"))
    >>> one.block_table, two.block_table = [4, 5, 6], [4, 5, 7]
    >>> pages = HeadPages(16, generations=[0] * 8)
    >>> of_one, of_two = HeadSequence(), HeadSequence()
    >>> pages.extend(of_one, one, 0, 20)
    0
    >>> pages.extend(of_two, two, 35, 39), of_two.table  # the first block is known, the next is not
    (16, [4, 7])
    """

    def __init__(self, block_size: int, generations: Sequence[int]) -> None:
        self._block_size = block_size
        self._generations = generations
        self._filled: dict[int, int] = {}  # block without gaps -> its generation when it was filled

    def follow(self, sequence: HeadSequence, request: Request) -> None:
        """Drop the keys in blocks that the request has lost, and all keys after them."""
        entries = sequence.blocks
        table = request.block_table
        has_restarted = request.num_restarts != sequence.num_restarts
        sequence.num_restarts = request.num_restarts
        # Without a restart only the last block can be replaced: it is copied on write.
        first = 0 if has_restarted else max(0, len(entries) - 1)
        for number in range(first, len(entries)):
            entry = entries[number]
            is_there = entry.index < len(table) and table[entry.index] == entry.block
            is_old = has_restarted and self._generations[entry.block] != entry.generation
            if is_old or not is_there:
                sequence.next_position = entry.first
                sequence.num_keys = number * self._block_size
                del entries[number:]
                return

    def rewind(self, sequence: HeadSequence, start: int) -> None:
        """Drop the blocks that hold keys of positions `start` and later."""
        while sequence.blocks and sequence.next_position > start:
            entry = sequence.blocks.pop()
            self._filled.pop(entry.block, None)
            sequence.next_position = entry.first
            sequence.num_keys = len(sequence.blocks) * self._block_size
        if not sequence.blocks:  # the first key may have followed a gap
            sequence.next_position = min(sequence.next_position, start)

    def extend(self, sequence: HeadSequence, request: Request, start: int, stop: int) -> int:
        """Allocate room for the keys of positions [start, stop), possibly after a gap.

        `start` must be at least `next_position`, and the request's block table must reach `stop`.
        Returns the index of the first key in the sequence's blocks.
        """
        if start > sequence.next_position:
            self._skip(sequence, request, start)
        size = self._block_size
        first = sequence.num_keys
        while len(sequence.blocks) * size < first + stop - start:
            position = start + len(sequence.blocks) * size - first
            self._append(sequence, request, position)
        sequence.num_keys = first + stop - start
        sequence.next_position = stop
        for entry in sequence.blocks[first // size : sequence.num_keys // size]:
            if entry.is_exact:
                self._filled[entry.block] = self._generations[entry.block]
        return first

    def _skip(self, sequence: HeadSequence, request: Request, start: int) -> None:
        """Skip to position `start`, and adopt the recorded blocks before it."""
        size = self._block_size
        if sequence.num_keys % size:
            sequence.blocks[-1].is_exact = False
        else:
            for index in range(-(-sequence.next_position // size), start // size):
                block = request.block_table[index]
                generation = self._generations[block]
                if self._filled.get(block) == generation:
                    sequence.blocks.append(_Block(block, index, generation, index * size, True))
                    sequence.num_keys += size
        sequence.next_position = start

    def _append(self, sequence: HeadSequence, request: Request, position: int) -> None:
        """Append the request's block that holds `position`.

        It cannot be in the sequence yet: all earlier blocks are full, so `position` is at least
        block_size beyond the first key of the last block.
        """
        index = position // self._block_size
        block = request.block_table[index]
        self._filled.pop(block, None)
        is_exact = position % self._block_size == 0
        generation = self._generations[block]
        sequence.blocks.append(_Block(block, index, generation, position, is_exact))
