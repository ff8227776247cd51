"""Admission checks: limits per request, and limits of the queue."""

from __future__ import annotations

from collections.abc import Sequence

from engine.errors import ContextLengthError, RequestError
from engine.request import Request
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.waiting import WaitingQueue

__all__ = ["QueueFullError", "check_queue", "check_request"]

_MAX_PRIORITY = 2**31


class QueueFullError(RequestError):
    """The queue is full; the same request may be accepted later."""


def check_request(request: Request, config: SchedulerConfig) -> int:
    """Return the maximum length of `request` in tokens, prompt plus output.

    Raises
    ------
    RequestError
        If the prompt is empty.
    ContextLengthError
        If the prompt is too long, or the request can never fit into the KV cache.
    """
    num_prompt = request.num_prompt_tokens
    if num_prompt >= config.max_model_len:
        raise ContextLengthError.of("prompt", num_prompt, config.max_model_len)
    if num_prompt < 1:
        raise RequestError(
            f"prompt must have 1 to {config.max_model_len - 1} tokens (max_model_len "
            f"{config.max_model_len} minus one to generate); got {num_prompt}"
        )
    if not -_MAX_PRIORITY < request.priority < _MAX_PRIORITY:
        raise RequestError(f"priority must be within 2**31 of 0; got {request.priority}")
    max_tokens = request.sampling_params.max_tokens
    longest = config.max_model_len if max_tokens is None else num_prompt + max_tokens
    longest = min(longest, config.max_model_len)
    if request.num_known_tokens >= longest:
        raise RequestError(
            f"a fork or resumed request must have fewer tokens than max_tokens and max_model_len "
            f"allow ({longest}); got {request.num_known_tokens}"
        )
    # The last token is never fed back, so its key needs no slot.
    num_blocks = -(-(longest - 1) // config.block_size)
    if num_blocks > config.num_blocks:
        raise ContextLengthError(
            f"a prompt of {num_prompt} tokens and up to {longest - num_prompt} new ones need "
            f"{num_blocks} KV blocks of {config.block_size} tokens, but there are only "
            f"{config.num_blocks}; lower max_tokens or shorten the prompt"
        )
    return longest


def check_queue(
    requests: Sequence[Request], num_waiting: int, waiting: WaitingQueue, config: SchedulerConfig
) -> None:
    """Check that `requests` may be queued behind `num_waiting` others.

    Raises
    ------
    QueueFullError
        If they would exceed `max_num_queued_requests` or `max_num_queued_tokens`.
    """
    limit = config.max_num_queued_requests
    if limit is not None and num_waiting + len(requests) > limit:
        raise QueueFullError(
            f"the queue is full: {num_waiting} requests wait, {len(requests)} more would exceed "
            f"max_num_queued_requests={limit}; try again later"
        )
    limit = config.max_num_queued_tokens
    num_tokens = sum(request.num_prompt_tokens for request in requests)
    # An empty queue accepts a request of any length.
    if limit is not None and waiting.num_tokens and waiting.num_tokens + num_tokens > limit:
        raise QueueFullError(
            f"the queue is full: {waiting.num_tokens} tokens wait, {num_tokens} more would exceed "
            f"max_num_queued_tokens={limit}; try again later"
        )
