"""`ScheduleOutput`: one step, as decided by `Scheduler.schedule()`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from engine.cache.state_slots import SlotMoves, StateAccess
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
        Whether they include the sequence's last token, so that a new token is sampled.
    num_pending_tokens : int
        Trailing tokens, drafts aside, whose ids only the device knows yet: 1 if an earlier step,
        still in flight, samples the id; otherwise 0.
    drafts : Drafts or None
        Tokens after the sequence's last one; only in a `DraftedSequence`. That last token and all
        drafts need logits.
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
        """Number of trailing tokens that are drafts."""
        return 0 if self.drafts is None else len(self.drafts)

    @property
    def num_logits(self) -> int:
        """Number of trailing tokens that need logits."""
        return 1 + self.num_draft_tokens if self.is_sampled else 0

    @property
    def is_decode(self) -> bool:
        """Tell whether the decode kernel can compute it, if `query_len` equals its token count."""
        return self.num_scheduled_tokens == 1 or (
            self.drafts is not None and self.num_scheduled_tokens <= MAX_QUERY_LEN
        )

    @property
    def context_len(self) -> int:
        """Tokens up to the last query token, drafts included: the number of keys to attend to."""
        return self.start + self.num_scheduled_tokens

    @property
    def num_reached_tokens(self) -> int:
        """Tokens of the sequence computed after this step, drafts aside."""
        return self.start + self.num_scheduled_tokens - self.num_draft_tokens

    def __repr__(self) -> str:
        stop = self.start + self.num_scheduled_tokens
        return f"<{self.request.request_id}[{self.start}:{stop}]{'*' if self.is_sampled else ''}>"


class DraftedSequence(ScheduledSequence):
    """A sequence with drafts; its own class, so that plain sequences need no slot for them."""

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
    """Token, sequence and decode counts of a step."""

    num_tokens: int = 0
    num_sequences: int = 0
    num_decodes: int = 0


@dataclass(slots=True)
class ScheduleOutput:
    """What one step computes, and the block moves that precede it.

    The runner first applies the block moves in this order (each may overwrite blocks that an
    earlier one has read): `swap_out`, `copies`, `swap_in`. Then it computes `sequences`.

    Attributes
    ----------
    step_id : int
        Number of earlier `schedule()` calls; steps are committed in this order.
    sequences : list of ScheduledSequence
        Decodes first: `num_decodes` of them, with `query_len` query tokens each.
    admitted : list of Request
        Requests that start or resume in this step.
    preempted : list of Request
        Requests that lost their blocks in this step. They are back in the queue, as PREEMPTED (to
        be recomputed) or SWAPPED.
    restarted : list of Request
        Requests that gave up their blocks in this step because their keys need other rope factors.
        They are recomputed, from this step on if they are among `admitted`.
    copies : list of (int, int)
        (source, destination) device blocks, for copy-on-write. Existing entries of a running
        request's block table change only in a step with copies; otherwise tables only grow.
    swap_out : list of (int, int)
        (device block, host block) to copy.
    swap_in : list of (int, int)
        (host block, device block) to copy.
    state_access : list of StateAccess
        For a model with recurrent layers: the slots of each sequence that does not just continue in
        the slot of its last step.
    slot_moves : SlotMoves or None
        Copies of state slots, made with the moves of blocks.
    freed_blocks : list of int
        Only with `SchedulerConfig.debug`: blocks whose content is no longer needed, to be poisoned
        after the moves and before the computation.
    num_scheduled_tokens : int
        Total over `sequences`.
    num_draft_tokens : int
        How many of these are drafts.
    num_decodes : int
        Number of decodes in `sequences`.
    query_len : int
        Query tokens per decode: one, plus its drafts.
    is_unchanged : bool
        Whether this step repeats step `step_id` - 1 with every sequence advanced by one token: same
        sequences, same order, all of them sampled decodes in both steps.
    """

    step_id: int
    sequences: list[ScheduledSequence] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    restarted: list[Request] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    state_access: list[StateAccess] = field(default_factory=list)
    slot_moves: SlotMoves | None = None
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
        """Tell whether the step has nothing to compute and nothing to copy."""
        has_moves = self.swap_out or self.copies or self.swap_in or self.slot_moves
        return not (self.sequences or has_moves)


class InFlightSteps(list[ScheduleOutput]):
    """Steps scheduled, but neither committed nor rolled back yet; oldest first."""

    def settle_oldest(self, output: ScheduleOutput) -> None:
        """Remove `output`: the oldest step, or an empty one, which was never added."""
        self._settle(output, 0)

    def settle_newest(self, output: ScheduleOutput) -> None:
        """Remove `output`: the newest step, or an empty one, which was never added."""
        self._settle(output, -1)

    def _settle(self, output: ScheduleOutput, index: int) -> None:
        if self and self[index] is output:
            self.pop(index)
        elif not output.is_empty:
            reason = f"step {self[index].step_id} comes first" if self else "none is in flight"
            raise ContractError(f"step {output.step_id} cannot be settled now; {reason}")
