"""/v1/responses: OpenAI's Responses API, without stored responses."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Iterable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from engine.server.agent_stream import Answered, begin_chat, chat_request, named_frame, num_tokens
from engine.server.limits import check_model, read_struct
from engine.server.openapi import Endpoint
from engine.server.protocol.errors import APIError, renamed_params
from engine.server.protocol.responses import ResponsesRequest, to_chat
from engine.server.protocol.responses_events import ResponseBuilder, ResponseObject
from engine.server.sse import EventStream, unless_disconnected

__all__ = ["ENDPOINTS", "routes"]

_STORED = "/v1/responses/{response_id}"
_STREAM_CODES = ("rate_limit_exceeded", "context_length_exceeded")
# Field of a chat completion -> the field of a response that it is made from.
_FIELDS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "structured": "text.format",
}

ENDPOINTS = (
    Endpoint(
        "post", "/v1/responses", "Answer an input", ResponsesRequest, ResponseObject, streams=True
    ),
    Endpoint("get", _STORED, "An error: no responses are stored"),
    Endpoint("delete", _STORED, "An error: no responses are stored"),
)


def routes() -> list[Route]:
    """Return the routes of this module."""
    return [
        Route("/v1/responses", create_response, methods=["POST"]),
        Route(_STORED, no_response, methods=["GET", "DELETE"]),
    ]


async def create_response(request: Request) -> Response:
    """Handle POST /v1/responses."""
    body = await read_struct(request, ResponsesRequest)
    model = check_model(body.model, request)
    chat = chat_request(to_chat(body))
    builder = ResponseBuilder(body, model)
    with renamed_params(_FIELDS):
        stream = await begin_chat(request, chat, builder.response["id"])
    answer = _Answer(request, Answered(stream), builder)
    if body.stream:
        interval = request.app.state.config.sse_keep_alive
        frames = answer.frames()
        error_frame = answer.error_frame
        return EventStream(frames, keep_alive=interval, error_frame=error_frame, last=b"")
    await unless_disconnected(request.receive, answer.whole())
    return Response(msgspec.json.encode(builder.response), media_type="application/json")


async def no_response(request: Request) -> Response:
    """Reply 404: responses are not stored."""
    name = request.path_params["response_id"][:100]
    message = f"the response {name!r} does not exist: no responses are stored"
    raise APIError(404, message, param="response_id")


class _Answer:
    """Response to one request, complete or as SSE frames."""

    def __init__(self, request: Request, answered: Answered, builder: ResponseBuilder) -> None:
        self._request = request
        self._answered = answered
        self._builder = builder
        self._start = b""  # first frames, built before the stream starts

    async def whole(self) -> None:
        """Build the complete response."""
        await self._answered.whole(self._builder)
        await self._ending()

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Yield the frames; errors that set the HTTP status are raised before the first."""
        self._start = _frames_of(self._builder.start())
        async with contextlib.aclosing(self._answered.events(self._builder)) as frames:
            async for frame in frames:
                if found := self._take_start() + frame:
                    yield found
        yield self._take_start() + _frames_of(await self._ending())

    def error_frame(self, error: APIError) -> bytes:
        """Return the frames that end the stream with an error."""
        code = error.code if error.code in _STREAM_CODES else "server_error"
        return self._take_start() + _frames_of(self._builder.fail(error.message, code))

    def _take_start(self) -> bytes:
        start = self._start
        self._start = b""
        return start

    async def _ending(self) -> list[dict[str, Any]]:
        stream = self._answered.stream
        last = self._answered.last
        num_reasoning = await num_tokens(self._request, "".join(self._answered.thoughts))
        usage = {
            "input_tokens": stream.num_prompt_tokens,
            "cached_tokens": stream.num_cached_tokens,
            "output_tokens": stream.num_output_tokens,
            "reasoning_tokens": min(num_reasoning, stream.num_output_tokens),
        }
        reason = None if last is None else last.finish_reason
        return list(self._builder.finish(reason or "stop", usage))


def _frames_of(events: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(map(named_frame, events))
