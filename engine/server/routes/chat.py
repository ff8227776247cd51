"""/v1/chat/completions: chat, streamed or not."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from engine.server.auth import isolate
from engine.server.chat_stream import ChatPiece, ChatStream
from engine.server.json_response import JsonResponse
from engine.server.limits import check_model, read_struct
from engine.server.openapi import Endpoint
from engine.server.protocol.chat import (
    AnswerMessage,
    AnswerToolCall,
    CalledFunction,
    ChatChoice,
    ChatChunks,
    ChatCompletionRequest,
    ChatCompletionResponse,
)
from engine.server.protocol.common import Usage, usage_options
from engine.server.protocol.logprobs import ChatLogprobs, TokenLogprob, prompt_logprobs
from engine.server.sse import EventStream, unless_disconnected
from engine.server.tool_parsers import (
    Event,
    TextDelta,
    ToolCallDelta,
    ToolCallStart,
    collect,
)

__all__ = ["ENDPOINTS", "answer_chat", "routes"]


ENDPOINTS = (
    Endpoint(
        "post",
        "/v1/chat/completions",
        "Answer a conversation",
        ChatCompletionRequest,
        ChatCompletionResponse,
        streams=True,
    ),
)


def routes() -> list[Route]:
    """Return the routes of this module."""
    return [Route("/v1/chat/completions", create_chat_completion, methods=["POST"])]


async def create_chat_completion(request: Request) -> Response:
    """Handle POST /v1/chat/completions."""
    body = await read_struct(request, ChatCompletionRequest)
    state = request.app.state
    model = check_model(body.model, request)
    isolate(request, body)
    request_id = f"chatcmpl-{secrets.token_hex(16)}"
    created = int(time.time())
    chat = await state.chat.prepare(body, request_id)
    stream = ChatStream(state.client, chat)
    if body.stream:
        shows_usage, is_continuous = usage_options(body.stream_options)
        chunks = ChatChunks(request_id, model, created, shows_usage=shows_usage)
        if body.return_token_ids:
            chunks.show_prompt("prompt_token_ids", stream.prompt_token_ids)
        frames = _frames(
            stream,
            chunks,
            chat.params.n,
            shows_usage=shows_usage,
            is_continuous=is_continuous,
            returns_ids=bool(body.return_token_ids),
        )
        return EventStream(frames, keep_alive=state.config.sse_keep_alive)
    work = answer_chat(
        stream,
        request_id,
        model,
        created,
        chat.params.n,
        returns_ids=bool(body.return_token_ids),
    )
    answer = await unless_disconnected(request.receive, work)
    has_logprobs = chat.params.logprobs is not None or chat.params.prompt_logprobs is not None
    encode = msgspec.json.encode
    data = await asyncio.to_thread(encode, answer) if has_logprobs else encode(answer)
    return JsonResponse(data)


def usage_of(stream: ChatStream) -> Usage:
    """Return the usage of a request."""
    return Usage.of(stream.num_prompt_tokens, stream.num_output_tokens, stream.num_cached_tokens)


# ---- without streaming


@dataclass
class _Choice:
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    last: ChatPiece | None = None
    token_ids: list[int] = field(default_factory=list)

    def add(self, piece: ChatPiece) -> None:
        self.token_ids += piece.token_ids
        self.content.append(piece.content)
        self.reasoning.append(piece.reasoning)
        if piece.events:
            self.events += piece.events
        elif piece.content:
            self.events.append(TextDelta(piece.content))
        if piece.logprobs is not None:
            self.logprobs = (self.logprobs or []) + piece.logprobs
        if piece.finish_reason is not None:
            self.last = piece

    def choice(self, index: int, *, returns_ids: bool) -> ChatChoice:
        parsed = collect(self.events)
        last = self.last
        calls = [
            AnswerToolCall(call.id, CalledFunction(call.name, call.arguments))
            for call in parsed.tool_calls
        ]
        content = parsed.content or (None if calls else "")
        return ChatChoice(
            index,
            AnswerMessage(content, calls or UNSET, "".join(self.reasoning) or UNSET),
            None if last is None else last.finish_reason,
            None if self.logprobs is None else ChatLogprobs(self.logprobs),
            None if last is None else last.stop_reason,
            self.token_ids if returns_ids else UNSET,
        )


async def answer_chat(
    stream: ChatStream,
    request_id: str,
    model: str,
    created: int,
    num_choices: int,
    *,
    returns_ids: bool = False,
) -> ChatCompletionResponse:
    """Return the complete response to a request.

    Raises
    ------
    RequestError, EngineError, APIError
        If the request cannot be served, or fails.
    """
    choices = [_Choice() for _ in range(num_choices)]
    async with contextlib.aclosing(stream.pieces()) as pieces:
        async for piece in pieces:
            choices[piece.index].add(piece)
    return ChatCompletionResponse(
        request_id,
        created,
        model,
        [choice.choice(i, returns_ids=returns_ids) for i, choice in enumerate(choices)],
        usage_of(stream),
        prompt_logprobs=await asyncio.to_thread(prompt_logprobs, stream.prompt_logprobs)
        if stream.prompt_logprobs
        else None,
        prompt_token_ids=list(stream.prompt_token_ids) if returns_ids else UNSET,
    )


# ---- streaming


async def _frames(
    stream: ChatStream,
    chunks: ChatChunks,
    num_choices: int,
    *,
    shows_usage: bool,
    is_continuous: bool,
    returns_ids: bool,
) -> AsyncGenerator[bytes, None]:
    begun = [False] * num_choices
    async with contextlib.aclosing(stream.pieces()) as pieces:
        async for piece in pieces:
            index = piece.index
            if stream.prompt_logprobs and not any(begun):
                await asyncio.to_thread(_show_prompt_logprobs, chunks, stream)
            if is_continuous:
                chunks.show_usage(usage_of(stream))
            if not begun[index]:
                begun[index] = True
                yield chunks.delta(index, {"role": "assistant", "content": ""})
            # The first frame of a piece carries its ids; the others have an empty list.
            ids = piece.token_ids if returns_ids else None
            if ids is None and not piece.calls and piece.logprobs is None:
                if piece.reasoning:
                    yield chunks.reasoning(index, piece.reasoning)
                if piece.content:
                    yield chunks.content(index, piece.content)
            else:
                for delta, logprobs in _deltas(piece, has_ids=bool(ids)):
                    yield chunks.delta(index, delta, logprobs, token_ids=ids)
                    ids = [] if returns_ids else None
            if piece.finish_reason is not None:
                reason = piece.finish_reason
                stop = piece.stop_reason
                yield chunks.delta(index, {}, None, reason, stop, ids)
    if shows_usage:
        yield chunks.usage(usage_of(stream))


def _show_prompt_logprobs(chunks: ChatChunks, stream: ChatStream) -> None:
    chunks.show_prompt("prompt_logprobs", prompt_logprobs(stream.prompt_logprobs))


def _deltas(
    piece: ChatPiece, *, has_ids: bool
) -> Sequence[tuple[dict[str, Any], ChatLogprobs | None]]:
    """Return the deltas of a piece; the first carries its log-probabilities and token ids."""
    found: list[dict[str, Any]] = []
    if piece.reasoning:
        found.append({"reasoning_content": piece.reasoning})
    if piece.content:
        found.append({"content": piece.content})
    found += [{"tool_calls": [call]} for event in piece.calls if (call := _call_delta(event))]
    if (piece.logprobs or (has_ids and piece.finish_reason is None)) and not found:
        found.append({"content": ""})
    logprobs = ChatLogprobs(piece.logprobs) if piece.logprobs else None
    return [(delta, None if i else logprobs) for i, delta in enumerate(found)]


def _call_delta(event: Event) -> dict[str, Any] | None:
    if isinstance(event, ToolCallStart):
        function = {"name": event.name, "arguments": ""}
        return {"index": event.index, "id": event.id, "type": "function", "function": function}
    if isinstance(event, ToolCallDelta):
        return {"index": event.index, "function": {"arguments": event.arguments}}
    return None
