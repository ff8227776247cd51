"""Shared by /v1/responses and /v1/messages: converts a chat answer to a stream of events."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec
from starlette.requests import Request

from engine.async_engine import LONG_TEXT
from engine.server.auth import isolate
from engine.server.chat_stream import ChatPiece, ChatStream
from engine.server.protocol.chat import ChatCompletionRequest
from engine.server.protocol.errors import APIError, renamed_params
from engine.server.tool_parsers import Event, TextDelta, settle

__all__ = ["AnswerBuilder", "Answered", "begin_chat", "chat_request", "named_frame", "num_tokens"]


_encode = msgspec.json.Encoder().encode


class AnswerBuilder(Protocol):
    """Builds a protocol's events from the chunks of one answer, in order."""

    def reasoning(self, text: str) -> Iterator[dict[str, Any]]:
        """Add a chunk of the reasoning."""

    def add(self, event: Event) -> Iterator[dict[str, Any]]:
        """Add a chunk of the text or of a tool call."""


def named_frame(event: dict[str, Any]) -> bytes:
    """Encode an event as a server-sent event named after its type.

    Examples
    --------
    >>> named_frame({"type": "ping"})
    b'event: ping\\ndata: {"type":"ping"}\\n\\n'
    """
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode("ascii"), _encode(event))


def chat_request(body: dict[str, Any]) -> ChatCompletionRequest:
    """Validate a /v1/chat/completions body and convert it to a struct.

    Raises
    ------
    APIError
        If a field is invalid.
    """
    try:
        return msgspec.convert(body, ChatCompletionRequest)
    except msgspec.ValidationError as error:
        raise APIError(400, f"the request is invalid: {error}") from None


async def begin_chat(
    request: Request, body: ChatCompletionRequest, request_id: str, names: Mapping[str, str]
) -> ChatStream:
    """Start a chat request with a single answer, and return its stream.

    `names`: field of the chat completion -> the field of the request that it is made from.

    Raises
    ------
    APIError, RequestError, TemplateError
        If it cannot be served.
    """
    state = request.app.state
    isolate(request, body)
    with renamed_params(names):
        chat = await state.chat.prepare(body, request_id)
    own = {name: names.get(field, field) for name, field in chat.names.items()}
    return ChatStream(state.client, dataclasses.replace(chat, names={**names, **own}))


async def num_tokens(request: Request, text: str) -> int:
    """Count the tokens of a text."""
    if not text:
        return 0
    encode = request.app.state.client.tokenizer.encode
    if len(text) > LONG_TEXT:
        return len(await asyncio.to_thread(encode, text, False))
    return len(encode(text, False))


class Answered:
    """Answer in progress.

    Parameters
    ----------
    stream : ChatStream

    Attributes
    ----------
    thoughts : list of str
        Chunks of the reasoning so far.
    last : ChatPiece or None
        The last chunk, once the answer is complete.
    """

    def __init__(self, stream: ChatStream) -> None:
        self.stream = stream
        self.thoughts: list[str] = []
        self.last: ChatPiece | None = None

    async def pieces(self) -> AsyncGenerator[ChatPiece, None]:
        """Yield the pieces.

        Raises
        ------
        APIError
            If the answer was aborted.
        """
        async with contextlib.aclosing(self.stream.pieces()) as pieces:
            async for piece in pieces:
                if piece.finish_reason == "abort":
                    raise _aborted(piece)
                if piece.reasoning:
                    self.thoughts.append(piece.reasoning)
                if piece.finish_reason is not None:
                    self.last = piece
                yield piece

    async def events(self, builder: AnswerBuilder) -> AsyncGenerator[bytes, None]:
        """Yield the answer's events as SSE frames; the first frame may be empty."""
        async with contextlib.aclosing(self.pieces()) as pieces:
            async for piece in pieces:
                yield b"".join(map(named_frame, _piece_events(builder, piece)))

    async def whole(self, builder: AnswerBuilder) -> None:
        """Feed the complete answer to `builder`, in order; a damaged call becomes text."""
        events: list[Event] = []
        async with contextlib.aclosing(self.pieces()) as pieces:
            async for piece in pieces:
                events += [_Thought(piece.reasoning), *_ordered(piece)]
        for event in settle(events):
            if isinstance(event, _Thought):
                _exhaust(builder.reasoning(event.text))
            else:
                _exhaust(builder.add(event))


class _Thought(TextDelta):
    """Chunk of the reasoning among the events of a complete answer."""


def _aborted(piece: ChatPiece) -> APIError:
    if piece.stop_reason == "timeout":
        return APIError(408, "the request was not finished within its timeout")
    return APIError(503, "the request was aborted")


def _piece_events(builder: AnswerBuilder, piece: ChatPiece) -> Iterator[dict[str, Any]]:
    yield from builder.reasoning(piece.reasoning)
    for event in _ordered(piece):
        yield from builder.add(event)


def _ordered(piece: ChatPiece) -> Sequence[Event]:
    """Return the text and tool call events of a piece in text order."""
    return piece.events or ([TextDelta(piece.content)] if piece.content else [])


def _exhaust(events: Iterator[dict[str, Any]]) -> None:
    for _ in events:
        pass
