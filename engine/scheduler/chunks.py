"""Chunks of a step: their size and order, and detection of unchanged batches."""

from __future__ import annotations

from engine.cache.state_slots import StateSlots
from engine.drafts import Drafts
from engine.request import Request
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.drafting import group_decodes
from engine.scheduler.output import DraftedSequence, ScheduledSequence, ScheduleOutput
from engine.scheduler.request_queues import RequestQueues

__all__ = ["UnchangedBatch", "add_chunk", "chunk_size", "put_decodes_first"]


def chunk_size(
    request: Request,
    output: ScheduleOutput,
    config: SchedulerConfig,
    states: StateSlots | None = None,
    *,
    reserved: int = 0,
) -> int:
    """Return how many tokens of `request` still fit into the step, drafts aside.

    `states`: of a model with recurrent layers; it ends chunks where a snapshot is wanted.
    `reserved`: tokens of the step's budget to leave for decodes scheduled later.
    """
    room = config.max_num_batched_tokens - output.num_scheduled_tokens - reserved
    if config.max_prefill_chunk:
        room = min(room, config.max_prefill_chunk)
    size = min(room, request.num_tokens - request.num_computed_tokens)
    return size if states is None or not size else states.fit_chunk(request, size)


def add_chunk(
    request: Request, output: ScheduleOutput, num_new: int, drafts: Drafts | None
) -> None:
    """Schedule the next `num_new` tokens of `request`, and update all counts.

    `drafts`: from `fitting_drafts`, with their blocks already allocated.
    """
    start = request.num_computed_tokens
    is_sampled = start + num_new == request.num_tokens
    num_pending = 1 if is_sampled and request.num_pending_tokens else 0
    num_drafts = 0
    if drafts is None:
        sequence = ScheduledSequence(request, start, num_new, is_sampled, num_pending)
    else:
        num_drafts = len(drafts)
        sequence = DraftedSequence(request, start, num_new + num_drafts, num_pending, drafts)
    output.sequences.append(sequence)
    output.num_scheduled_tokens += num_new + num_drafts
    output.num_draft_tokens += num_drafts
    request.num_computed_tokens += num_new
    request.num_tokens += is_sampled
    request.num_pending_tokens += is_sampled
    request.num_draft_tokens = num_drafts
    if is_sampled and not num_drafts:
        request.drafts = None  # stale: proposed for the position sampled now


def put_decodes_first(output: ScheduleOutput) -> None:
    """Move decodes before all other chunks; the first `num_decodes` are already in place."""
    first = output.num_decodes
    sequences = output.sequences
    if output.num_draft_tokens:
        group_decodes(output)
    elif first < len(sequences):
        rest = sequences[first:]
        decodes = [s for s in rest if s.num_scheduled_tokens == 1]
        sequences[first:] = decodes + [s for s in rest if s.num_scheduled_tokens != 1]
        output.num_decodes += len(decodes)


class UnchangedBatch:
    """Detects steps that differ from the previous one only in their positions."""

    def __init__(self) -> None:
        # `num_changes` at the previous step; -1 unless that step decoded every running request.
        self._num_changes = -1

    def mark(self, output: ScheduleOutput, queues: RequestQueues, *, has_chunks: bool) -> None:
        """Set `output.is_unchanged`; call it for every step, in order."""
        is_all = len(output.sequences) == len(queues.running) > 0
        if has_chunks or output.admitted or not is_all:
            self._num_changes = -1
        else:
            output.is_unchanged = self._num_changes == queues.num_changes
            self._num_changes = queues.num_changes
