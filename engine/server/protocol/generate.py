"""/inference/v1/generate: request and response bodies, token ids in and out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from engine.sampling_params import RequestOutputKind, SamplingParams
from engine.server.protocol.common import (
    UNREAD,
    SamplingOptions,
    StreamOptions,
    Usage,
    check_stream_options,
    only_output,
    refuse_fields,
    sampling_options,
)
from engine.server.protocol.errors import APIError
from engine.server.protocol.logprobs import ChatLogprobs, PromptLogprob

__all__ = [
    "GenerateChoice",
    "GenerateRequest",
    "GenerateResponse",
    "GenerateSampling",
    "generate_params",
]

MAX_ID_CHARS = 256


class GenerateSampling(SamplingOptions, kw_only=True, forbid_unknown_fields=True):
    """`sampling_params` of a request: the fields of `SamplingParams`, with its defaults."""

    logprobs: int | None = None
    detokenize: bool | None = None


class GenerateRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Request body of /inference/v1/generate."""

    token_ids: list[int]
    sampling_params: GenerateSampling | None = None
    request_id: str | None = None
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: int | None = None
    timeout: float | None = None
    # Rejected unless null.
    features: msgspec.Raw = UNREAD
    kv_transfer_params: msgspec.Raw = UNREAD


class GenerateChoice(msgspec.Struct):
    """One of the `n` continuations; in a stream, the part since the last frame."""

    index: int
    token_ids: Sequence[int]
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class GenerateResponse(msgspec.Struct):
    """Response body of /inference/v1/generate; in a stream, one frame."""

    request_id: str
    model: str
    created: int
    choices: list[GenerateChoice]
    usage: Usage | None = None
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | None = None


def generate_params(body: GenerateRequest) -> SamplingParams:
    """Return the sampling parameters of a request, which take no defaults from the model.

    Without `max_tokens`, as many tokens are generated as fit. Text is built only to find stop
    strings in it.

    Raises
    ------
    RequestError, APIError
        If a field is out of range or not supported.
    """
    refuse_fields(
        body,
        {
            "features": "the model reads text only",
            "kv_transfer_params": "keys are not transferred",
        },
    )
    if body.request_id is not None and not 0 < len(body.request_id) <= MAX_ID_CHARS:
        message = f"request_id must have 1 to {MAX_ID_CHARS} characters; got {len(body.request_id)}"
        raise APIError(400, message, param="request_id")
    given = body.sampling_params or GenerateSampling()
    options: dict[str, Any] = {"max_tokens": None} | sampling_options(given)
    options["logprobs"] = given.logprobs
    options["detokenize"] = bool(given.stop)
    if given.structured_outputs is not None:
        options["structured"] = only_output(given.structured_outputs)
    check_stream_options(body.stream_options, body.stream)
    kind = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
    return SamplingParams(**options, output_kind=kind)
