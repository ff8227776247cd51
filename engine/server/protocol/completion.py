"""/v1/completions: request and response bodies, prompts and sampling parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import msgspec

from engine.checks import shown
from engine.sampling_params import SamplingDefaults, SamplingParams
from engine.server.protocol.common import (
    Chunks,
    SamplingFields,
    Usage,
    refuse_fields,
    sampling_params,
)
from engine.server.protocol.errors import APIError
from engine.server.protocol.logprobs import CompletionLogprobs, PromptLogprob

__all__ = [
    "CompletionChoice",
    "CompletionChunks",
    "CompletionRequest",
    "CompletionResponse",
    "completion_params",
    "prompts_of",
]

MAX_LOGPROBS = 20

_encode = msgspec.json.Encoder().encode


class CompletionRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """Request body of /v1/completions."""

    prompt: str | list[int | str | list[int]]
    model: str | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None


class CompletionChoice(msgspec.Struct):
    """One continuation of a prompt; in a stream, the part since the last frame.

    `token_ids` and `prompt_token_ids`, the latter only in a choice's first frame, are present if
    the request has `return_token_ids`.
    """

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class CompletionResponse(msgspec.Struct):
    """Response body of /v1/completions."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    object: Literal["text_completion"] = "text_completion"
    system_fingerprint: str | None = None


def prompts_of(
    prompt: str | Sequence[int | str | list[int]], limit: int = 1024, name: str = "prompt"
) -> list[str | list[int]]:
    """Return the prompts of a request, its field `name`: texts or lists of token ids.

    Raises
    ------
    APIError
        If there are no prompts or too many, or texts and token ids are mixed.

    Examples
    --------
    >>> prompts_of("a"), prompts_of([1, 2]), prompts_of([[1], [2]]), prompts_of(["a", "b"])
    (['a'], [[1, 2]], [[1], [2]], ['a', 'b'])
    """
    if isinstance(prompt, str):
        return [prompt]
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return [list(prompt)]  # type: ignore[arg-type]
    if len(kinds) != 1 or len(prompt) > limit:
        raise APIError(
            400,
            f"{name} must be a text, token ids, or 1 to {limit} of these; "
            f"got {len(prompt)} items, {shown(list(prompt))}",
            param=name,
        )
    return list(prompt)  # type: ignore[arg-type]


def completion_params(body: CompletionRequest, defaults: SamplingDefaults) -> SamplingParams:
    """Return the sampling parameters of a request.

    With `echo` and `max_tokens` 0, one token is generated, but the response omits it.

    Raises
    ------
    RequestError, APIError
        If a field is out of range or not supported.
    """
    refuse_fields(body, {"suffix": "put the text around the gap into prompt"})
    if body.logprobs is not None and not 0 <= body.logprobs <= MAX_LOGPROBS:
        message = f"logprobs must be a whole number in [0, {MAX_LOGPROBS}]; got {body.logprobs}"
        raise APIError(400, message, param="logprobs")
    prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None and prompt_logprobs != -1:  # -1: all tokens
        prompt_logprobs = max(body.logprobs, prompt_logprobs or 0)
    max_tokens = 1 if body.echo and body.max_tokens == 0 else body.max_tokens
    own = {name: value for name, value in defaults.values.items() if name != "max_tokens"}
    return sampling_params(
        body,
        dataclasses.replace(defaults, values=own),
        logprobs=body.logprobs,
        prompt_logprobs=prompt_logprobs,
        max_tokens=max_tokens,
    )


class CompletionChunks(Chunks):
    """Encodes the SSE frames of a streamed completion.

    Examples
    --------
    >>> chunks = CompletionChunks("cmpl-0", "m", 5, shows_usage=False)
    >>> print(chunks.text(0, "Hi").decode().strip())
    data: {"id":"cmpl-0","object":"text_completion","created":5,"model":"m","choices":\
[{"index":0,"text":"Hi","logprobs":null,"finish_reason":null,"stop_reason":null}]}
    """

    _object = "text_completion"
    _plain_end = b',"logprobs":null,"finish_reason":null,"stop_reason":null}'

    def text(self, index: int, text: str) -> bytes:
        """Return a frame that contains only text."""
        return b'%b{"index":%d,"text":%b%b' % (self._head, index, _encode(text), self._plain_tail)
