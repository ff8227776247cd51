"""What one call of `Scheduler.schedule()` decides."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.drafts import MAX_QUERY_LEN, Drafts
from engine.errors import ContractError
from engine.request import Request

__all__ = ["DraftedSequence", "InFlightSteps", "ScheduleOutput", "ScheduledSequence"]


class ScheduledSequence:
    """The share of one request in one step.

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
        How many of the last ones, drafts aside, have ids that only the device knows (0 unless the
        loop runs one step late, then 0 or 1): the id sampled for this request by the step before.
    drafts : Drafts or None
        The tokens behind the sequence's last one, of a `DraftedSequence`: its logits and theirs are
        all wanted.
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
        """How many of the last tokens are drafts."""
        return 0 if self.drafts is None else len(self.drafts)

    @property
    def num_logits(self) -> int:
        """Tokens whose logits are wanted: the last ones."""
        return 1 + self.num_draft_tokens if self.is_sampled else 0

    @property
    def is_decode(self) -> bool:
        """Tell whether the decode kernel may compute it, in a step of as many query tokens."""
        return self.num_scheduled_tokens == 1 or (
            self.drafts is not None and self.num_scheduled_tokens <= MAX_QUERY_LEN
        )

    @property
    def context_len(self) -> int:
        """Tokens up to the last query token, drafts included: the keys that are in the pages."""
        return self.start + self.num_scheduled_tokens

    @property
    def num_reached_tokens(self) -> int:
        """Tokens of the sequence that are computed after this step, drafts aside."""
        return self.start + self.num_scheduled_tokens - self.num_draft_tokens

    def __repr__(self) -> str:
        stop = self.start + self.num_scheduled_tokens
        return f"<{self.request.request_id}[{self.start}:{stop}]{'*' if self.is_sampled else ''}>"


class DraftedSequence(ScheduledSequence):
    """The share of a request that has drafts; apart, so that others need no place for them."""

    __slots__ = ("drafts",)

    def __init__(
        self,
        request: Request,
        start: int,
        num_scheduled_tokens: int,
        num_pending_tokens: int,
        drafts: Drafts,
    ) -> None:
        super().__init__(request, start, num_scheduled_tokens, True, num_pending_tokens)
        self.drafts: Drafts = drafts


@dataclass(slots=True)
class ScheduleOutput:
    """One step.

    The runner first applies the block moves, in this order (each may reuse the blocks that the
    one before has read): `swap_out`, `copies`, `swap_in`; then it computes `sequences`.

    Attributes
    ----------
    step_id : int
        Counts calls of `schedule()`; outputs are committed in this order.
    sequences : list of ScheduledSequence
        The decodes first: `num_decodes` of them, with `query_len` query tokens each.
    admitted : list of Request
        Requests that begin or resume in this step.
    preempted : list of Request
        Requests whose blocks were taken in this step; they are back in the queue, with status
        PREEMPTED (to be recomputed) or SWAPPED.
    copies : list of (int, int)
        (source, destination) device blocks, for copy-on-write. Only in a step with copies does an
        entry of a running request's block table change; otherwise tables only grow.
    swap_out : list of (int, int)
        (device block, host block) to copy.
    swap_in : list of (int, int)
        (host block, device block) to copy.
    freed_blocks : list of int
        With `SchedulerConfig.debug` only: blocks whose content became worthless. To be poisoned
        after the moves and before the computation.
    num_scheduled_tokens : int
        Sum over `sequences`.
    num_draft_tokens : int
        How many of these are drafts.
    num_decodes : int
        How many of `sequences` are decodes.
    query_len : int
        Query tokens of each decode: one, and its drafts where there are any.
    is_unchanged : bool
        Whether the sequences are those of step `step_id` - 1, in the same order, each one token
        further: all of them decodes, all sampled, then as now.
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
    def is_empty(self) -> bool:
        """Tell whether there is nothing to compute and nothing to copy."""
        return not (self.sequences or self.swap_out or self.copies or self.swap_in)


class InFlightSteps(list[ScheduleOutput]):
    """The steps that are scheduled and not settled, oldest first."""

    def settle_oldest(self, output: ScheduleOutput) -> None:
        """Take out `output`, which must be the oldest step (an empty one is not there)."""
        self._settle(output, 0)

    def settle_newest(self, output: ScheduleOutput) -> None:
        """Take out `output`, which must be the newest step (an empty one is not there)."""
        self._settle(output, -1)

    def _settle(self, output: ScheduleOutput, index: int) -> None:
        if output.is_empty:
            return
        if not self or self[index] is not output:
            wanted = f"step {self[index].step_id} comes first" if self else "none is in flight"
            raise ContractError(f"step {output.step_id} is not to be settled now; {wanted}")
        self.pop(index)
