"""KV pages of the draft model: the target's block ids, plus spare blocks for drafts.

The draft model has its own slab, because its layers differ in shape, but no allocator, prefix tree
or block tables: a request's KV is stored under the block ids of its block table. The scheduler
allocates, shares, copies, swaps and frees these blocks for the target only. So `DraftPages`
records each block whose tokens the draft model has all computed, with the block's generation
(`BlockAllocator.generations`); if the generation has changed, the block is recomputed.

Drafts may reach beyond the block table, because the target allocates blocks for drafts only when
it verifies them. Their KV is written to the request's spare blocks, and copied from there once
the table has grown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.request import Request

__all__ = ["DraftPages", "SequencePages", "num_spare_blocks"]


def num_spare_blocks(block_size: int, num_drafts: int) -> int:
    """Return the number of spare blocks a request needs for up to `num_drafts` drafts per step.

    Examples
    --------
    >>> num_spare_blocks(16, 4), num_spare_blocks(16, 17)
    (1, 2)
    """
    return -(-num_drafts // block_size)


@dataclass(slots=True)
class SequencePages:
    """The draft model's block table of one request.

    Attributes
    ----------
    spare : list of int
        Spare blocks: spare[i % len(spare)] stands in for entry i of the table.
    long_rope : bool
        Whether the draft model rotates this request's keys with longrope's long factors.
        Drafts use those of the known tokens: they are only guesses.
    blocks : list of int
        Blocks of the target's table that the draft model may write.
    num_valid : int
        Number of leading tokens whose KV is in the pages.
    is_rewritten : bool
        Set when entries of the table change; cleared by the caller.
    """

    spare: list[int]
    long_rope: bool = False
    blocks: list[int] = field(default_factory=list)
    num_valid: int = 0
    is_rewritten: bool = False
    num_recorded: int = 0  # number of leading blocks recorded as computed
    num_restarts: int = 0  # `Request.num_restarts` when the block table was last adopted

    @property
    def table(self) -> list[int]:
        """The block table: the target's blocks, then the spare ones."""
        first = len(self.blocks)
        count = len(self.spare)
        return self.blocks + [self.spare[i % count] for i in range(first, first + count)]

    def rotate_anew(self, long_rope: bool) -> None:
        """Change the rope factors: no key in the pages is valid any more."""
        self.long_rope = long_rope
        self.num_valid = self.num_recorded = 0


class DraftPages:
    """Records which of the target's blocks the draft model has fully computed.

    Parameters
    ----------
    block_size : int
    generations : sequence of int
        The allocator's live list, indexed by block.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> rules = SimpleNamespace(max_tokens=1, min_tokens=0, ignore_eos=False, stop_token_ids=None)
    >>> one, two = (Request(name, list(range(20)), rules) for name in ("one", "two"))
    >>> one.block_table, two.block_table = [4, 5], [4, 6]
    >>> pages = DraftPages(16, generations=[0] * 8)
    >>> of_one, of_two = SequencePages([8]), SequencePages([9])
    >>> pages.follow(of_one, one), of_one.table, of_one.num_valid
    ([], [4, 5, 8], 0)
    >>> pages.computed(of_one, 20)
    >>> pages.follow(of_two, two), of_two.num_valid  # they share their first block
    ([], 16)
    """

    def __init__(self, block_size: int, generations: Sequence[int]) -> None:
        self._block_size = block_size
        self._generations = generations
        self._computed: dict[int, tuple[int, bool]] = {}  # block -> (generation, long_rope)

    def follow(self, pages: SequencePages, request: Request) -> list[tuple[int, int]]:
        """Adopt the request's block table, and update the number of valid tokens.

        Returns
        -------
        list of (int, int)
            (source, destination) blocks to copy before the next step.
        """
        blocks = request.block_table
        copies = []
        if request.shares_last_block:  # the target copies it before its next write
            blocks = blocks[:-1]
        if pages.num_restarts != request.num_restarts:
            pages.num_restarts = request.num_restarts
            pages.blocks = []
            pages.num_valid = 0
        if blocks != pages.blocks:
            copies = self._adopt(pages, list(blocks))
        size = self._block_size
        index = pages.num_valid // size
        stop = min(request.num_known_tokens // size, len(pages.blocks))
        while index < stop and self._is_computed(pages, pages.blocks[index]):
            index += 1
        pages.num_valid = max(pages.num_valid, index * size)
        return copies

    def computed(self, pages: SequencePages, num_tokens: int) -> None:
        """Record that the KV of the first `num_tokens` known tokens is in the pages."""
        pages.num_valid = num_tokens
        num_full = min(num_tokens // self._block_size, len(pages.blocks))
        for block in pages.blocks[pages.num_recorded : num_full]:
            self._computed[block] = self._generations[block], pages.long_rope
        pages.num_recorded = max(pages.num_recorded, num_full)

    def _is_computed(self, pages: SequencePages, block: int) -> bool:
        return self._computed.get(block) == (self._generations[block], pages.long_rope)

    def _adopt(self, pages: SequencePages, blocks: list[int]) -> list[tuple[int, int]]:
        """Replace the target's blocks; return the copies from spare blocks to new ones."""
        size = self._block_size
        old = pages.blocks
        kept = _common_length(old, blocks)
        if kept < len(old):  # the next block was copied on write, or will be (it is shared)
            pages.num_valid = min(pages.num_valid, kept * size)
        num_used = -(-pages.num_valid // size)
        copies = [
            (pages.spare[index % len(pages.spare)], blocks[index])
            for index in range(kept, min(num_used, len(blocks)))
        ]
        pages.blocks = blocks
        pages.is_rewritten = True
        pages.num_recorded = min(pages.num_recorded, kept)
        return copies


def _common_length(old: list[int], new: list[int]) -> int:
    """Return the length of the common prefix."""
    if new[: len(old)] == old:
        return len(old)
    pairs = zip(old, new, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(old), len(new)))
