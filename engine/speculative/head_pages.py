"""Which keys of a draft head are in which of the target's blocks.

A head has keys of its own, in a cache with the target's block ids. It can compute the key of a
token only while it has the target's features of it: in the step that computes this token. Keys that
were never computed stay missing: of a prefix that was found in the cache, of blocks that were
swapped or copied, of tokens decoded while no drafts were asked for.

The rule: a head attends to the keys that it has, and to no others. The keys of a request are one
after another in some of its blocks, with the positions of their tokens, without room for missing
ones. A full block without gaps is remembered by the hash of all tokens up to its end, and a request
that gets it as a cached prefix attends to it too. (Its last key was made with the token that
followed then; it may be another one now.) A wrong or missing key can only make drafts worse.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.request import Request
from engine.speculative.prefix_hashes import prefix_hash

__all__ = ["HeadPages", "HeadSequence"]


@dataclass(slots=True)
class _Block:
    """A block with keys of one request."""

    block: int
    index: int  # in the request's block table
    version: int
    first: int  # position of its first key
    is_exact: bool  # its keys are those of the same block of the target, without gaps


@dataclass(slots=True)
class HeadSequence:
    """The keys that a head has of one request.

    Attributes
    ----------
    num_keys : int
        How many there are.
    next_position : int
        The position after that of the last one.
    """

    num_keys: int = 0
    next_position: int = 0
    num_restarts: int = 0
    blocks: list[_Block] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)  # of the tokens up to the end of each block

    @property
    def table(self) -> list[int]:
        """Its block table: key i is in block i // block_size."""
        return [entry.block for entry in self.blocks]


class HeadPages:
    """The blocks of all requests.

    Parameters
    ----------
    block_size : int

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> rules = SimpleNamespace(max_tokens=1, min_tokens=0, ignore_eos=False, stop_token_ids=None)
    >>> one, two = (Request(name, list(range(40)), rules) for name in ("one", "two"))
    >>> one.block_table, two.block_table = [4, 5, 6], [4, 5, 7]
    >>> pages, of_one, of_two = HeadPages(16), HeadSequence(), HeadSequence()
    >>> pages.extend(of_one, one, 0, 20)
    0
    >>> pages.extend(of_two, two, 35, 39), of_two.table  # the first block is known, the next is not
    (16, [4, 7])
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._filled: dict[int, int] = {}  # block -> hash of the tokens up to its end
        self._versions: dict[int, int] = {}  # block -> how often its keys were replaced

    def follow(self, sequence: HeadSequence, request: Request) -> None:
        """Drop the keys in blocks that the request does not have any more, and those after them."""
        entries = sequence.blocks
        table = request.block_table
        first = max(0, len(entries) - 1)  # without a restart only the last block is replaced
        if request.num_restarts != sequence.num_restarts:
            sequence.num_restarts = request.num_restarts
            first = 0
        for number in range(first, len(entries)):
            entry = entries[number]
            is_there = entry.index < len(table) and table[entry.index] == entry.block
            if not is_there or self._versions.get(entry.block, 0) != entry.version:
                sequence.next_position = entry.first
                sequence.num_keys = number * self._block_size
                del entries[number:]
                return

    def rewind(self, sequence: HeadSequence, start: int) -> None:
        """Drop the blocks with keys of positions from `start` on."""
        while sequence.blocks and sequence.next_position > start:
            entry = sequence.blocks.pop()
            self._filled.pop(entry.block, None)
            sequence.next_position = entry.first
            sequence.num_keys = len(sequence.blocks) * self._block_size
        if not sequence.blocks:  # the first key may have been behind a gap
            sequence.next_position = min(sequence.next_position, start)

    def extend(self, sequence: HeadSequence, request: Request, start: int, stop: int) -> int:
        """Make room for the keys of positions [start, stop), which may be behind a gap.

        `start` must be at least `next_position`, and the request's block table reach to `stop`.
        Returns the number of the first key: where it is in the sequence's blocks.
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
        for number in range(first // size, sequence.num_keys // size):
            entry = sequence.blocks[number]
            if entry.is_exact:
                self._filled[entry.block] = self._hash(sequence, request, entry.index)
        return first

    def _skip(self, sequence: HeadSequence, request: Request, start: int) -> None:
        """Go on at `start`; known blocks before it are taken over."""
        size = self._block_size
        if sequence.num_keys % size:
            sequence.blocks[-1].is_exact = False
        else:
            for index in range(-(-sequence.next_position // size), start // size):
                block = request.block_table[index]
                if self._filled.get(block) == self._hash(sequence, request, index):
                    version = self._versions.get(block, 0)
                    sequence.blocks.append(_Block(block, index, version, index * size, True))
                    sequence.num_keys += size
        sequence.next_position = start

    def _append(self, sequence: HeadSequence, request: Request, position: int) -> None:
        """Append the block of `position`.

        It is not among those before: they are full of keys, so `position` is at least a block's
        size after the first key of the last one.
        """
        index = position // self._block_size
        block = request.block_table[index]
        self._filled.pop(block, None)
        version = self._versions[block] = self._versions.get(block, 0) + 1
        is_exact = position % self._block_size == 0
        sequence.blocks.append(_Block(block, index, version, position, is_exact))

    def _hash(self, sequence: HeadSequence, request: Request, index: int) -> int:
        """Return the hash of the tokens up to the end of block `index` of the table."""
        salt = int(request.long_rope)
        return prefix_hash(sequence.hashes, request, index, self._block_size, salt)
