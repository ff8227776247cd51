"""/v1/messages and /v1/messages/count_tokens: Anthropic's protocol."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from engine.server.agent_stream import Answered, begin_chat, chat_request, named_frame
from engine.server.json_response import JsonResponse
from engine.server.limits import check_model, read_struct
from engine.server.openapi import Endpoint
from engine.server.protocol.anthropic import CountTokensRequest, MessagesRequest, to_chat
from engine.server.protocol.anthropic_events import MessageBuilder, MessageObject, TokenCount
from engine.server.protocol.chat import ChatCompletionRequest
from engine.server.protocol.errors import APIError, error_body
from engine.server.sse import EventStream, unless_disconnected

__all__ = ["ENDPOINTS", "routes"]

_MESSAGES = "/v1/messages"
_COUNT = "/v1/messages/count_tokens"
# Field of a chat completion -> the field of a message that it is made from.
_FIELDS = {
    "stop": "stop_sequences",
    "max_completion_tokens": "max_tokens",
    "response_format": "output_config.format",
}

ENDPOINTS = (
    Endpoint(
        "post", _MESSAGES, "Answer a conversation", MessagesRequest, MessageObject, streams=True
    ),
    Endpoint("post", _COUNT, "Count the tokens of a prompt", CountTokensRequest, TokenCount),
)


def routes() -> list[Route]:
    """Return the routes of this module."""
    return [
        Route(_MESSAGES, create_message, methods=["POST"]),
        Route(_COUNT, count_tokens, methods=["POST"]),
    ]


async def create_message(request: Request) -> Response:
    """Handle POST /v1/messages."""
    body = await read_struct(request, MessagesRequest)
    model = check_model(body.model, request)
    chat = await _chat(request, body)
    builder = MessageBuilder(model)
    answered = Answered(await begin_chat(request, chat, builder.message["id"], _FIELDS))
    if body.stream:
        return EventStream(
            _frames(answered, builder),
            keep_alive=request.app.state.config.sse_keep_alive,
            error_frame=lambda error: _error_frame(request, error),
            last=b"",
        )
    await unless_disconnected(request.receive, _whole(answered, builder))
    data = msgspec.json.encode(builder.message)
    return JsonResponse(data)


async def count_tokens(request: Request) -> Response:
    """Handle POST /v1/messages/count_tokens: count the tokens of the prompt."""
    body = await read_struct(request, CountTokensRequest)
    check_model(body.model, request)
    chat = await _chat(request, body)
    prompt = await asyncio.to_thread(request.app.state.chat.render, chat)
    count = TokenCount(len(prompt["prompt_token_ids"]))
    return JsonResponse(count)


async def _chat(request: Request, body: CountTokensRequest) -> ChatCompletionRequest:
    """Convert to a chat request; `thinking` needs a template that can switch it."""
    chat = chat_request(to_chat(body))
    state = request.app.state
    if chat.chat_template_kwargs and state.client.tokenizer is not None:
        known = await asyncio.to_thread(state.client.tokenizer.template_variables, bool(chat.tools))
        if "enable_thinking" not in known:
            if chat.chat_template_kwargs["enable_thinking"] and not state.chat.reasoning_parser:
                raise APIError(400, "thinking must be disabled: the model does not reason")
            chat.chat_template_kwargs = None
    return chat


async def _whole(answered: Answered, builder: MessageBuilder) -> None:
    await answered.whole(builder)
    for _ in (*_start(answered, builder), *_ending(answered, builder)):
        pass


async def _frames(answered: Answered, builder: MessageBuilder) -> AsyncGenerator[bytes, None]:
    is_started = False
    async with contextlib.aclosing(answered.events(builder)) as frames:
        async for frame in frames:  # before the first frame, errors set the HTTP status
            if not is_started:
                is_started = True
                frame = b"".join(map(named_frame, _start(answered, builder))) + frame
            if frame:
                yield frame
    yield b"".join(map(named_frame, _ending(answered, builder)))


def _start(answered: Answered, builder: MessageBuilder) -> Iterator[dict[str, Any]]:
    stream = answered.stream
    return builder.start(stream.num_prompt_tokens, stream.num_cached_tokens)


def _ending(answered: Answered, builder: MessageBuilder) -> Iterator[dict[str, Any]]:
    last = answered.last
    count = answered.stream.num_output_tokens
    if last is None:
        return builder.finish("stop", None, count)
    stop = last.stop_reason if isinstance(last.stop_reason, str) else None
    return builder.finish(last.finish_reason or "stop", stop, count)


def _error_frame(request: Request, error: APIError) -> bytes:
    body = error_body(error, request.url.path, request.state.request_id)
    return b"event: error\ndata: %b\n\n" % body
