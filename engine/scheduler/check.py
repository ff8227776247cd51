"""The scheduler's invariants, checked request by request."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from engine.errors import EngineError
from engine.request import Request, RequestStatus
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.output import ScheduleOutput

__all__ = ["check_output", "check_queues", "check_request_state"]


def check_queues(
    requests: Collection[Request],
    running: Sequence[Request],
    waiting: Iterable[Request],
    siblings: Iterable[Request],
    config: SchedulerConfig,
) -> None:
    """Verify that each request is in exactly one queue, and that the limits hold."""
    queued = [*running, *waiting, *siblings]
    is_partition = {id(r) for r in queued} == {id(r) for r in requests}
    _verify(is_partition and len(queued) == len(requests), "a request is in two queues or none")
    _verify(len(running) <= config.max_num_seqs, "more than max_num_seqs requests are running")
    orders = [request.order for request in running]
    _verify(orders == sorted(orders), "the running requests are out of order")
    for request in requests:
        is_running = request.status is RequestStatus.RUNNING
        _verify(is_running == any(r is request for r in running), f"{_name(request)}: wrong queue")
        check_request_state(request, config)


def check_request_state(request: Request, config: SchedulerConfig) -> None:
    """Verify the token counts of an unfinished request, and the blocks it holds."""
    name = _name(request)
    status = request.status
    known = request.num_known_tokens
    computed = request.num_computed_tokens
    _verify(not request.is_finished, f"{name} is finished, but still queued")
    _verify(
        request.num_tokens == known + request.num_pending_tokens,
        f"{name}: num_tokens != known + pending",
    )
    _verify(request.num_pending_tokens >= 0, f"{name}: num_pending_tokens < 0")
    _verify(request.num_committed_tokens <= computed, f"{name}: committed > computed")
    _verify(computed < request.num_tokens, f"{name}: nothing left to compute")
    _verify(request.num_tokens <= request.max_num_tokens, f"{name}: longer than max_num_tokens")
    _verify(
        not request.long_rope or request.needs_long_rope or not computed,
        f"{name}: its keys are rotated with the long factors, but it is short",
    )
    _verify(
        computed <= len(request.block_table) * config.block_size or status is RequestStatus.SWAPPED,
        f"{name}: more tokens computed than slots held",
    )
    _verify(
        not request.num_draft_tokens or request.drafts is not None,
        f"{name}: drafts are in flight, but not kept",
    )
    is_running = status is RequestStatus.RUNNING
    is_swapped = status is RequestStatus.SWAPPED
    _verify(is_running or request.drafts is None, f"{name} is waiting, but has drafts")
    _verify(is_running or not request.block_table, f"{name} is waiting, but holds blocks")
    _verify(
        is_swapped == bool(request.host_block_table),
        f"{name}: only a swapped request has host blocks",
    )
    _verify(is_running or is_swapped or not computed, f"{name} is waiting, but has computed tokens")


def check_output(output: ScheduleOutput, config: SchedulerConfig) -> None:
    """Verify one step: its token budget, chunk bounds and blocks."""
    sequences = output.sequences
    total = sum(sequence.num_scheduled_tokens for sequence in sequences)
    _verify(total == output.num_scheduled_tokens, "the step's tokens do not add up")
    total_drafts = sum(sequence.num_draft_tokens for sequence in sequences)
    _verify(total_drafts == output.num_draft_tokens, "the step's drafts do not add up")
    _verify(total <= config.max_num_batched_tokens, "the step exceeds its token budget")
    _verify(len(sequences) <= config.max_num_seqs, "the step has too many sequences")
    _verify(not (output.preempted and output.admitted), "a step both preempts and admits")
    requests = {id(sequence.request) for sequence in sequences}
    _verify(len(requests) == len(sequences), "a request is in one step twice")
    for index, sequence in enumerate(sequences):
        request = sequence.request
        name = _name(request)
        is_decode = sequence.is_decode and sequence.num_scheduled_tokens == output.query_len
        _verify(is_decode or index >= output.num_decodes, f"{name}: a prefill among the decodes")
        _verify(
            not is_decode or index < output.num_decodes or output.num_draft_tokens > 0,
            f"{name}: a decode among the prefills",
        )
        _verify(sequence.num_scheduled_tokens >= 1, f"{name}: no token is scheduled")
        _verify(
            sequence.num_reached_tokens == request.num_computed_tokens,
            f"{name}: the chunk does not end at num_computed_tokens",
        )
        _verify(
            sequence.num_draft_tokens == request.num_draft_tokens <= config.max_draft_tokens,
            f"{name}: the number of drafts is wrong",
        )
        is_short = request.short_rope_len and not request.long_rope
        _verify(
            not is_short or sequence.context_len <= request.short_rope_len,
            f"{name}: too long for the short rope factors of its keys",
        )
        slots = len(request.block_table) * config.block_size
        _verify(sequence.context_len <= slots, f"{name}: too few slots for the chunk")
    written = [block for _, block in output.copies] + [block for _, block in output.swap_in]
    _verify(len(set(written)) == len(written), "two moves fill the same block")
    sources = {block for block, _ in output.copies}
    _verify(not sources & set(written), "a move fills a block that another still has to copy")
    saved = [block for _, block in output.swap_out]
    _verify(len(set(saved)) == len(saved), "two moves fill the same host block")


def _name(request: Request) -> str:
    return f"request {request.request_id!r}"


def _verify(holds: bool, message: str) -> None:
    if not holds:
        raise EngineError(f"scheduler: {message}")
