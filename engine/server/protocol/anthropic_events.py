"""/v1/messages: builds the response message and its stream events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from engine.server.tool_parsers import (
    Event,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    random_id,
)
from engine.server.tool_parsers.json_scanner import complete_values

__all__ = ["MessageBuilder", "MessageObject", "TokenCount"]

_Events = Iterator[dict[str, Any]]

_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


class MessageObject(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Response body of /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: dict[str, int]


class TokenCount(msgspec.Struct):
    """Response body of /v1/messages/count_tokens."""

    input_tokens: int


class MessageBuilder:
    """Builds the response message, and its stream events, from the chunks of an answer.

    Each method returns an iterator of events: dicts with a "type". A caller that does not stream
    exhausts the iterators and sends `message` at the end.

    Parameters
    ----------
    model : str
        Model name to report in the message.

    Attributes
    ----------
    message : dict
        The message so far.
    """

    def __init__(self, model: str) -> None:
        self.message: dict[str, Any] = {
            "id": random_id("msg_"),
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {},
        }
        self._block: dict[str, Any] | None = None  # the current block
        self._parts: list[str] = []  # chunks of its text, thinking or tool input
        self._has_calls = False  # whether any tool call is complete

    def start(self, input_tokens: int, cached_tokens: int) -> _Events:
        """Begin the message; the counts are the prompt's."""
        self.message["usage"] = {
            "input_tokens": input_tokens - cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached_tokens,
            "output_tokens": 0,
        }
        yield {
            "type": "message_start",
            "message": {**self.message, "content": [], "usage": self.message["usage"].copy()},
        }
        yield {"type": "ping"}

    def reasoning(self, text: str) -> _Events:
        """Add a chunk of the reasoning."""
        if text:
            delta = {"type": "thinking_delta", "thinking": text}
            yield from self._add("thinking", {"thinking": "", "signature": ""}, text, delta)

    def add(self, event: Event) -> _Events:
        """Add a chunk of the answer's text or of a tool call."""
        if isinstance(event, TextDelta):
            if event.text:
                delta = {"type": "text_delta", "text": event.text}
                yield from self._add("text", {"text": ""}, event.text, delta)
        elif isinstance(event, ToolCallStart):
            block = {"type": "tool_use", "id": event.id, "name": event.name, "input": {}}
            yield from self._begin(block)
        elif isinstance(event, ToolCallDelta):
            self._parts.append(event.arguments)
            yield self._delta({"type": "input_json_delta", "partial_json": event.arguments})
        elif isinstance(event, ToolCallEnd):
            self._has_calls = self._has_calls or event.is_complete
            yield from self._end()

    def finish(self, finish_reason: str, stop_sequence: str | None, output_tokens: int) -> _Events:
        """End the message.

        Parameters
        ----------
        finish_reason : str
            `finish_reason` as in chat completions.
        stop_sequence : str or None
            Stop sequence that ended the answer.
        output_tokens : int
        """
        yield from self._end()
        reason = _STOP_REASONS.get(finish_reason, "end_turn")
        if reason == "end_turn" and self._has_calls:
            reason = "tool_use"
        elif reason == "end_turn" and stop_sequence is not None:
            reason = "stop_sequence"
        ending = {
            "stop_reason": reason,
            "stop_sequence": stop_sequence if reason == "stop_sequence" else None,
        }
        self.message |= ending
        self.message["usage"]["output_tokens"] = output_tokens
        yield {"type": "message_delta", "delta": ending, "usage": self.message["usage"]}
        yield {"type": "message_stop"}

    # ---- blocks

    def _add(self, kind: str, empty: dict[str, Any], text: str, delta: dict[str, Any]) -> _Events:
        if self._block is None or self._block["type"] != kind:
            yield from self._begin({"type": kind, **empty})
        self._parts.append(text)
        yield self._delta(delta)

    def _begin(self, block: dict[str, Any]) -> _Events:
        yield from self._end()
        self._block = block
        self._parts = []
        self.message["content"].append(block)
        index = len(self.message["content"]) - 1
        yield {"type": "content_block_start", "index": index, "content_block": block.copy()}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        index = len(self.message["content"]) - 1
        return {"type": "content_block_delta", "index": index, "delta": delta}

    def _end(self) -> _Events:
        """End the current block."""
        block = self._block
        self._block = None
        if block is None:
            return
        text = "".join(self._parts)
        if block["type"] == "tool_use":
            block["input"] = complete_values(text)
        else:
            block[block["type"]] = text
        yield {"type": "content_block_stop", "index": len(self.message["content"]) - 1}
