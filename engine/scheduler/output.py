"""`ScheduleOutput`: the step that one call of `Scheduler.schedule()` decides on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from engine.drafts import MAX_QUERY_LEN, Drafts
from engine.errors import ContractError
from engine.request import Request

__all__ = ["BatchSize", "DraftedSequence", "InFlightSteps", "ScheduleOutput", "ScheduledSequence"]


class ScheduledSequence:
    """The tokens of one request in one step.

    Attributes
    ----------
    request : Request
        Its `block_table` covers at least `context_len` tokens.
    start : int
        Position of the first token computed in this step.
    num_scheduled_tokens : int
        Tokens [start, start + num_scheduled_tokens) are computed.
    is_sampled : bool
        Whether the sequence's last token is among them, so that a new token is sampled.
    num_pending_tokens : int
        Last tokens, drafts aside, whose ids only the device knows: 0, or 1 if the previous step,
        which sampled the id, is still in flight.
    drafts : Drafts or None
        Only in a `DraftedSequence`: the tokens after the sequence's last one. The logits of that
        token and of all drafts are needed.
    """

    __slots__ = ("is_sampled", "num_pending_tokens", "num_scheduled_tokens", "request", "start")
    drafts: Drafts | None = None

    def __init__(
        self,
        request: Request,
        start: int,
        num_scheduled_tokens: int,
        is_sampled: bool,
        num_pending_tokens: int,
    ) -> None:
        self.request = request
        self.start = start
        self.num_scheduled_tokens = num_scheduled_tokens
        self.is_sampled = is_sampled
        self.num_pending_tokens = num_pending_tokens

    @property
    def num_draft_tokens(self) -> int:
        """Number of last tokens that are drafts."""
        return 0 if self.drafts is None else len(self.drafts)

    @property
    def num_logits(self) -> int:
        """Number of last tokens that need logits."""
        return 1 + self.num_draft_tokens if self.is_sampled else 0

    @property
    def is_decode(self) -> bool:
        """Tell whether the decode kernel can compute it, given a `query_len` of its tokens."""
        return self.num_scheduled_tokens == 1 or (
            self.drafts is not None and self.num_scheduled_tokens <= MAX_QUERY_LEN
        )

    @property
    def context_len(self) -> int:
        """Tokens up to the last query token, drafts included: the number of keys in the pages."""
        return self.start + self.num_scheduled_tokens

    @property
    def num_reached_tokens(self) -> int:
        """Computed tokens of the sequence after this step, drafts aside."""
        return self.start + self.num_scheduled_tokens - self.num_draft_tokens

    def __repr__(self) -> str:
        stop = self.start + self.num_scheduled_tokens
        return f"<{self.request.request_id}[{self.start}:{stop}]{'*' if self.is_sampled else ''}>"


class DraftedSequence(ScheduledSequence):
    """A sequence with drafts; a separate class, so that other sequences need no slot for them."""

    __slots__ = ("drafts",)

    def __init__(
        self,
        request: Request,
        start: int,
        num_scheduled_tokens: int,
        num_pending_tokens: int,
        drafts: Drafts,
    ) -> None:
        self.request = request
        self.start = start
        self.num_scheduled_tokens = num_scheduled_tokens
        self.is_sampled = True
        self.num_pending_tokens = num_pending_tokens
        self.drafts: Drafts = drafts


class BatchSize(NamedTuple):
    """Size of a step's batch."""

    num_tokens: int = 0
    num_sequences: int = 0
    num_decodes: int = 0


@dataclass(slots=True)
class ScheduleOutput:
    """One step.

    The runner first applies the block moves, in this order (each may overwrite blocks that an
    earlier one has read): `swap_out`, `copies`, `swap_in`; then it computes `sequences`.

    Attributes
    ----------
    step_id : int
        Number of earlier calls of `schedule()`; steps are committed in this order.
    sequences : list of ScheduledSequence
        Decodes first: `num_decodes` of them, with `query_len` query tokens each.
    admitted : list of Request
        Requests that start or resume in this step.
    preempted : list of Request
        Requests that lost their blocks in this step; they are back in the queue, with status
        PREEMPTED (to be recomputed) or SWAPPED.
    copies : list of (int, int)
        (source, destination) device blocks, for copy-on-write. Entries of a running request's block
        table change only in a step with copies; otherwise tables only grow.
    swap_out : list of (int, int)
        (device block, host block) to copy.
    swap_in : list of (int, int)
        (host block, device block) to copy.
    freed_blocks : list of int
        With `SchedulerConfig.debug` only: blocks whose content is no longer needed, to be poisoned
        after the moves and before the computation.
    num_scheduled_tokens : int
        Sum over `sequences`.
    num_draft_tokens : int
        Drafts among these.
    num_decodes : int
        Decodes among `sequences`.
    query_len : int
        Query tokens of each decode: one, plus its drafts.
    is_unchanged : bool
        Whether the sequences are those of step `step_id` - 1, in the same order, each advanced by
        one token: all of them decodes, all sampled, in both steps.
    """

    step_id: int
    sequences: list[ScheduledSequence] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    freed_blocks: list[int] = field(default_factory=list)
    num_scheduled_tokens: int = 0
    num_draft_tokens: int = 0
    num_decodes: int = 0
    query_len: int = 1
    is_unchanged: bool = False

    @property
    def size(self) -> BatchSize:
        """Size of the step's batch."""
        return BatchSize(self.num_scheduled_tokens, len(self.sequences), self.num_decodes)

    @property
    def is_empty(self) -> bool:
        """Tell whether there is nothing to compute and nothing to copy."""
        return not (self.sequences or self.swap_out or self.copies or self.swap_in)


class InFlightSteps(list[ScheduleOutput]):
    """Steps that are scheduled, but neither committed nor rolled back yet; oldest first."""

    def settle_oldest(self, output: ScheduleOutput) -> None:
        """Remove `output`, which must be the oldest step, or empty (then it was never added)."""
        self._settle(output, 0)

    def settle_newest(self, output: ScheduleOutput) -> None:
        """Remove `output`, which must be the newest step, or empty (then it was never added)."""
        self._settle(output, -1)

    def _settle(self, output: ScheduleOutput, index: int) -> None:
        if self and self[index] is output:
            self.pop(index)
        elif not output.is_empty:
            reason = f"step {self[index].step_id} comes first" if self else "none is in flight"
            raise ContractError(f"step {output.step_id} cannot be settled now; {reason}")
