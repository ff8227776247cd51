"""The pages of a draft model: those of the target's blocks, and spare ones for its drafts.

A draft model has a cache of its own, with the same block ids as the target's: a request's keys are
in the blocks of its block table. The scheduler knows nothing of that; it shares, copies, swaps and
frees blocks for the target. So `DraftPages` remembers, for each block, a hash of all tokens up to
its end: those whose keys the draft has there. A block whose hash is another is computed again.

Drafts may reach beyond the block table, as the target gets blocks for them only when they are
verified. Their keys are in spare blocks, which each request has, and are copied once there is a
block for them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.request import Request
from engine.speculative.prefix_hashes import prefix_hash

__all__ = ["DraftPages", "SequencePages", "num_spare_blocks"]


def num_spare_blocks(block_size: int, num_drafts: int) -> int:
    """Return the spare blocks of one request that may get `num_drafts` drafts in a step.

    Examples
    --------
    >>> num_spare_blocks(16, 4), num_spare_blocks(16, 17)
    (1, 2)
    """
    return -(-num_drafts // block_size)


@dataclass(slots=True)
class SequencePages:
    """Where the draft's keys of one request are.

    Attributes
    ----------
    spare : list of int
        Its spare blocks. What would be block i of the table is number i % len(spare).
    salt : int
        Sequences of different salts have different keys of the same tokens.
    blocks : list of int
        The target's blocks that the draft may write to.
    num_valid : int
        The keys of the first `num_valid` tokens are in the pages.
    is_rewritten : bool
        Whether entries of the table have changed since this was last set to False.
    """

    spare: list[int]
    salt: int = 0
    blocks: list[int] = field(default_factory=list)
    num_valid: int = 0
    is_rewritten: bool = False
    hashes: list[int] = field(default_factory=list)  # of the tokens up to the end of each block
    num_recorded: int = 0  # blocks that `DraftPages` knows to be filled
    num_restarts: int = 0  # of the request, when its block table was last taken over

    @property
    def table(self) -> list[int]:
        """The block table: the target's blocks, and after them the spare ones."""
        first = len(self.blocks)
        count = len(self.spare)
        return self.blocks + [self.spare[i % count] for i in range(first, first + count)]


class DraftPages:
    """Which tokens' keys each of the target's blocks holds in the draft's cache.

    Parameters
    ----------
    block_size : int

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> rules = SimpleNamespace(max_tokens=1, min_tokens=0, ignore_eos=False, stop_token_ids=None)
    >>> one, two = (Request(name, list(range(20)), rules) for name in ("one", "two"))
    >>> one.block_table, two.block_table = [4, 5], [4, 6]
    >>> pages = DraftPages(16)
    >>> of_one, of_two = SequencePages([8]), SequencePages([9])
    >>> pages.follow(of_one, one), of_one.table, of_one.num_valid
    ([], [4, 5, 8], 0)
    >>> pages.computed(of_one, one, 20)
    >>> pages.follow(of_two, two), of_two.num_valid  # its first block is the same
    ([], 16)
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._filled: dict[int, int] = {}  # block -> hash of the tokens up to its end

    def follow(self, pages: SequencePages, request: Request) -> list[tuple[int, int]]:
        """Take over the request's block table, and find what is still valid.

        Returns
        -------
        list of (int, int)
            (source, destination) blocks to copy before anything is computed.
        """
        blocks = request.block_table
        copies = []
        if request.shares_last_block:  # it is copied before the target writes to it
            blocks = blocks[:-1]
        if pages.num_restarts != request.num_restarts:  # others may have had its blocks
            pages.num_restarts = request.num_restarts
            pages.blocks = []
            pages.num_valid = 0
        if blocks != pages.blocks:
            copies = self._adopt(pages, request, list(blocks))
        size = self._block_size
        index = pages.num_valid // size
        stop = request.num_known_tokens // size
        first = index
        while index < min(stop, len(pages.blocks)):
            if self._filled.get(pages.blocks[index]) != self._hash(pages, request, index):
                break
            index += 1
        if index > first:
            pages.num_valid = index * size
        return copies

    def computed(self, pages: SequencePages, request: Request, num_tokens: int) -> None:
        """Note that the keys of the first `num_tokens` known tokens are in the pages."""
        pages.num_valid = num_tokens
        num_full = min(num_tokens // self._block_size, len(pages.blocks))
        for index in range(pages.num_recorded, num_full):
            self._filled[pages.blocks[index]] = self._hash(pages, request, index)
        pages.num_recorded = max(pages.num_recorded, num_full)

    def _adopt(
        self, pages: SequencePages, request: Request, blocks: list[int]
    ) -> list[tuple[int, int]]:
        """Replace the target's blocks; return the spare blocks that become one of them."""
        size = self._block_size
        old = pages.blocks
        kept = _common_length(old, blocks)
        if len(blocks) < len(old):
            pages.num_valid = min(pages.num_valid, len(blocks) * size)
        copies: list[tuple[int, int]] = []
        for index in range(kept, len(blocks)):
            if index * size >= pages.num_valid:
                break
            if index < len(old):
                pages.num_valid = index * size
                break
            copies.append((pages.spare[index % len(pages.spare)], blocks[index]))
        pages.blocks = blocks
        pages.is_rewritten = True
        pages.num_recorded = min(pages.num_recorded, kept)
        self._drop_others(pages, request, kept)
        return copies

    def _drop_others(self, pages: SequencePages, request: Request, first: int) -> None:
        """Forget what blocks from number `first` on hold, if it is not what they will hold."""
        num_full = request.num_known_tokens // self._block_size
        for index in range(first, len(pages.blocks)):
            block = pages.blocks[index]
            held = self._filled.get(block)
            if held is not None and (
                index >= num_full or held != self._hash(pages, request, index)
            ):
                del self._filled[block]

    def _hash(self, pages: SequencePages, request: Request, index: int) -> int:
        """Return the hash of the tokens up to the end of block `index` of the table."""
        return prefix_hash(pages.hashes, request, index, self._block_size, pages.salt)


def _common_length(old: list[int], new: list[int]) -> int:
    """Return how many leading entries are equal."""
    if new[: len(old)] == old:
        return len(old)
    pairs = zip(old, new, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(old), len(new)))
