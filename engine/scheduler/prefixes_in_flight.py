"""Prefixes being computed right now: a request that shares one waits for it.

Requests with a long common prefix often arrive together. If all were admitted in the same step,
each would compute that prefix; instead the first one does, and the others wait.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.cache.block_manager import BlockManager
from engine.request import Request, RequestStatus
from engine.scheduler.output import ScheduleOutput

__all__ = ["PrefixesInFlight"]

_Key = tuple[object, int, tuple[int, ...]]


class PrefixesInFlight:
    """Prompts that uncommitted steps are computing.

    Each is keyed by its first block that is not in the tree yet: salt and rope kind, preceding
    block, and token ids.

    Parameters
    ----------
    blocks : BlockManager
    outputs : iterable of ScheduleOutput
        Uncommitted steps, including the one being scheduled.
    """

    def __init__(self, blocks: BlockManager, outputs: Iterable[ScheduleOutput]) -> None:
        self._blocks = blocks
        self._by_key: dict[_Key, Request] = {}
        for output in outputs:
            for sequence in output.sequences[output.num_decodes :]:
                request = sequence.request
                if sequence.num_scheduled_tokens > 1 and sequence.start < request.num_prompt_tokens:
                    self.add(request)

    def add(self, request: Request) -> None:
        """Register `request`, whose prompt is being computed."""
        if self._blocks.tree is None or request.status is not RequestStatus.RUNNING:
            return  # without a tree or blocks, nothing can be shared
        known = request.num_tree_blocks
        last = request.block_table[known - 1] if known else -1
        key = self._key(request, known, last)
        if key is not None:
            self._by_key.setdefault(key, request)

    def covers_most_of(self, request: Request) -> bool:
        """Tell whether a registered prompt covers at least half of what `request` must compute."""
        if not self._by_key or not request.reuse_prefix:
            return False
        found = self._blocks.match(request).known
        if found.host_nodes:
            return False
        known = len(found.blocks)
        key = self._key(request, known, found.blocks[-1] if known else -1)
        other = self._by_key.get(key) if key is not None else None
        if other is None:
            return False
        start = known * self._blocks.block_size
        middle = (start + request.num_tokens + 1) // 2
        ids = request.token_ids(start, middle)
        return other.prompt_token_ids[start:middle] == ids

    def _key(self, request: Request, known: int, last: int) -> _Key | None:
        start = known * self._blocks.block_size
        stop = start + self._blocks.block_size
        if stop >= request.num_tokens:
            return None
        return request.prefix_key, last, tuple(request.token_ids(start, stop))
