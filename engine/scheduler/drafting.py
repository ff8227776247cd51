"""Drafts in a step: validation, the number that fits, acceptance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from engine.drafts import MAX_QUERY_LEN, MAX_STATE_QUERY_LEN, Drafts
from engine.errors import RequestError
from engine.request import Request, RequestStatus
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.output import DraftedSequence, ScheduleOutput

__all__ = ["DraftTokens", "checked_drafts", "count_accepted", "fitting_drafts", "group_decodes"]

DraftTokens = Sequence[int] | Drafts
"""Proposed drafts: a chain of token ids, or a `Drafts` chain or tree."""


def checked_drafts(
    request: Request,
    token_ids: DraftTokens,
    parents: Sequence[int] | None,
    config: SchedulerConfig,
) -> Drafts | None:
    """Return the drafts proposed for `request`, or None if there are none.

    Raises
    ------
    RequestError
        If there are more than `max_draft_tokens`, or they are not a valid chain or tree.
    """
    limit = config.max_draft_tokens
    if len(token_ids) > limit:
        raise RequestError(
            f"request {request.request_id!r}: token_ids must have at most max_draft_tokens = "
            f"{limit} drafts; got {len(token_ids)}"
        )
    if isinstance(token_ids, Drafts):
        return token_ids if len(token_ids) else None
    drafts = Drafts(tuple(token_ids), None if parents is None else tuple(parents))
    return drafts if len(drafts) else None


def fitting_drafts(
    request: Request,
    num_new: int,
    output: ScheduleOutput,
    config: SchedulerConfig,
    *,
    reserved: int,
) -> Drafts | None:
    """Return the drafts of `request` that fit into the step after its next `num_new` tokens.

    They may exceed `max_num_tokens`, so that all sequences can carry the same number; tokens
    sampled past the limit are dropped. They never exceed `short_rope_len` while the keys are
    rotated with the short factors: their logits would be those of other factors.

    Recurrent layers keep a state after each token of a sequence with drafts, in a chain of at most
    `MAX_STATE_QUERY_LEN` tokens that follows all others.

    `reserved`: tokens of the step's budget to leave for requests scheduled later.
    """
    drafts = request.drafts
    if drafts is None or request.num_computed_tokens + num_new < request.num_tokens:
        return None
    if config.num_state_slots and num_new > 1:
        return None
    room = min(
        config.max_num_batched_tokens - output.num_scheduled_tokens - num_new - reserved,
        config.max_model_len - request.num_tokens,
    )
    if request.short_rope_len and not request.long_rope:
        room = min(room, request.short_rope_len - request.num_tokens)
    if config.num_state_slots:
        room = min(room, MAX_STATE_QUERY_LEN - num_new)
    if drafts.parents is not None:
        if not config.draft_trees or config.num_state_slots:
            drafts = drafts.chain()
        if drafts.is_tree:
            room = min(room, MAX_QUERY_LEN - num_new)
    return drafts.prefix(room) if room > 0 else None


def group_decodes(output: ScheduleOutput) -> None:
    """Make the sequences with the most common number of query tokens the step's decodes.

    The rest are computed as prefills, which support no trees: each tree is truncated to a chain.
    """
    first = output.sequences[0].num_scheduled_tokens
    if all([s.num_scheduled_tokens == first and s.is_decode for s in output.sequences]):
        output.num_decodes = len(output.sequences)
        output.query_len = first
        return
    lengths = Counter(s.num_scheduled_tokens for s in output.sequences if s.is_decode)
    length = max(lengths, key=lambda n: (lengths[n], n), default=1)
    decodes = [s for s in output.sequences if s.is_decode and s.num_scheduled_tokens == length]
    kept = set(map(id, decodes))
    others = [s for s in output.sequences if id(s) not in kept]
    for sequence in others:
        if isinstance(sequence, DraftedSequence) and sequence.drafts.is_tree:
            chain = sequence.drafts.chain()
            num_cut = len(sequence.drafts) - len(chain)
            sequence.drafts = chain
            sequence.num_scheduled_tokens -= num_cut
            sequence.request.num_draft_tokens -= num_cut
            output.num_scheduled_tokens -= num_cut
            output.num_draft_tokens -= num_cut
    # A truncated tree stays a prefill, even if it is now as long as the decodes.
    output.sequences[:] = decodes + others
    output.num_decodes = len(decodes)
    output.query_len = length


def count_accepted(request: Request, token_ids: Sequence[int]) -> None:
    """Count accepted drafts as computed; the last id of `token_ids` follows the last draft."""
    if request.status is RequestStatus.RUNNING:
        request.num_computed_tokens += len(token_ids) - 1
        request.num_committed_tokens += len(token_ids) - 1
    request.drop_drafts()
