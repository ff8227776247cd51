"""/v1/responses: builds the response object and its stream events."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from engine.server.protocol.responses import ResponsesRequest
from engine.server.tool_parsers import (
    Event,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    random_id,
)

__all__ = ["ResponseBuilder", "ResponseObject"]

_Events = Iterator[dict[str, Any]]


class ResponseObject(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Response body of /v1/responses."""

    id: str
    object: Literal["response"]
    created_at: float
    completed_at: float | None = None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    error: dict[str, str] | None
    incomplete_details: dict[str, str] | None
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None
    instructions: str | None
    max_output_tokens: int | None
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, str | None]
    store: bool
    temperature: float | None
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[Any]
    top_p: float | None
    truncation: Literal["disabled"]
    metadata: dict[str, str]
    background: bool


class ResponseBuilder:
    """Builds the response, and its stream events, from the chunks of an answer.

    Each method returns an iterator of events: dicts with "type" and "sequence_number". A caller
    that does not stream exhausts the iterators and sends `response` at the end.

    Parameters
    ----------
    request : ResponsesRequest
    model : str
        Model name to report in the response.
    is_stored : bool
        Whether the server keeps the response.

    Attributes
    ----------
    response : dict
        The response so far.
    """

    def __init__(self, request: ResponsesRequest, model: str, *, is_stored: bool = False) -> None:
        self.response = _new_response(request, model, is_stored=is_stored)
        self._num_events = 0
        self._item: dict[str, Any] | None = None  # the current item
        self._parts: list[str] = []  # chunks of its text, reasoning or arguments

    def start(self) -> _Events:
        """Begin the response; one in the background is queued first."""
        kinds = ["created", "in_progress"]
        if self.response["background"]:
            kinds.insert(1, "queued")
        for kind in kinds:
            is_queued = self.response["background"] and kind != "in_progress"
            status = "queued" if is_queued else "in_progress"
            response = {**self.response, "status": status, "output": []}
            yield self._event(f"response.{kind}", response=response)

    def reasoning(self, text: str) -> _Events:
        """Add a chunk of the reasoning."""
        yield from self._add_text("reasoning", text)

    def add(self, event: Event) -> _Events:
        """Add a chunk of the answer's text or of a tool call."""
        if isinstance(event, TextDelta):
            yield from self._add_text("message", event.text)
        elif isinstance(event, ToolCallStart):
            yield from self._begin(
                {
                    "id": random_id("fc_"),
                    "type": "function_call",
                    "status": "in_progress",
                    "call_id": event.id,
                    "name": event.name,
                    "arguments": "",
                }
            )
        elif isinstance(event, ToolCallDelta):
            self._parts.append(event.arguments)
            yield self._item_event("function_call_arguments.delta", delta=event.arguments)
        elif isinstance(event, ToolCallEnd):
            yield from self._end("completed" if event.is_complete else "incomplete")

    def finish(self, finish_reason: str, usage: dict[str, int]) -> _Events:
        """End the response.

        Parameters
        ----------
        finish_reason : str
            `finish_reason` as in chat completions; "length" makes the response incomplete.
        usage : dict
            "input_tokens", "cached_tokens", "output_tokens" and "reasoning_tokens".
        """
        status = "incomplete" if finish_reason == "length" else "completed"
        if not self.response["output"]:  # an empty answer is a turn of the conversation, too
            yield from self._begin_text("message")
        yield from self._end(status)
        if status == "incomplete":
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self.response["completed_at"] = time.time()
        self.response["usage"] = _usage(usage)
        yield self._closing_event(status)

    def fail(self, message: str, code: str = "server_error") -> _Events:
        """End the response with an error."""
        yield from self._end("incomplete")
        self.response["error"] = {"code": code, "message": message}
        yield self._closing_event("failed")

    def cancel(self) -> _Events:
        """End a background response; only its last item has events for that."""
        yield from self._end("incomplete")
        self.response["status"] = "cancelled"

    def _closing_event(self, status: str) -> dict[str, Any]:
        self.response["status"] = status
        return self._event(f"response.{status}", response=self.response)

    # ---- items

    def _add_text(self, kind: str, text: str) -> _Events:
        if not text:
            return
        if self._item is None or self._item["type"] != kind:
            yield from self._begin_text(kind)
        self._parts.append(text)
        if kind == "reasoning":
            yield self._item_event("reasoning_text.delta", content_index=0, delta=text)
        else:
            yield self._item_event("output_text.delta", content_index=0, delta=text, logprobs=[])

    def _begin_text(self, kind: str) -> _Events:
        item: dict[str, Any] = {"type": kind, "status": "in_progress", "content": []}
        if kind == "reasoning":
            item |= {"id": random_id("rs_"), "summary": []}
        else:
            item |= {"id": random_id("msg_"), "role": "assistant"}
        yield from self._begin(item)
        yield self._item_event("content_part.added", content_index=0, part=_part(kind, ""))

    def _begin(self, item: dict[str, Any]) -> _Events:
        yield from self._end("completed")
        self._item = item
        self._parts = []
        self.response["output"].append(item)
        yield self._output_event("output_item.added", item.copy())

    def _end(self, status: str) -> _Events:
        """End the current item."""
        item = self._item
        if item is None:
            return
        item["status"] = status
        text = "".join(self._parts)
        if item["type"] == "function_call":
            item["arguments"] = text
            yield self._item_event(
                "function_call_arguments.done", name=item["name"], arguments=text
            )
        else:
            yield from self._end_text(item, text)
        self._item = None
        yield self._output_event("output_item.done", item)

    def _end_text(self, item: dict[str, Any], text: str) -> _Events:
        part = _part(item["type"], text)
        item["content"] = [part]
        if item["type"] == "reasoning":
            yield self._item_event("reasoning_text.done", content_index=0, text=text)
        else:
            yield self._item_event("output_text.done", content_index=0, text=text, logprobs=[])
        yield self._item_event("content_part.done", content_index=0, part=part)

    # ---- events

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **fields}

    def _output_event(self, kind: str, item: dict[str, Any]) -> dict[str, Any]:
        index = len(self.response["output"]) - 1
        return self._event(f"response.{kind}", output_index=index, item=item)

    def _item_event(self, kind: str, **fields: Any) -> dict[str, Any]:
        assert self._item is not None  # only called between an item's first and last event
        index = len(self.response["output"]) - 1
        return self._event(
            f"response.{kind}", item_id=self._item["id"], output_index=index, **fields
        )


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(usage: dict[str, int]) -> dict[str, Any]:
    given = usage["input_tokens"]
    made = usage["output_tokens"]
    return {
        "input_tokens": given,
        "input_tokens_details": {
            "cached_tokens": usage["cached_tokens"],
            "cache_write_tokens": 0,
        },
        "output_tokens": made,
        "output_tokens_details": {"reasoning_tokens": usage["reasoning_tokens"]},
        "total_tokens": given + made,
    }


def _new_response(request: ResponsesRequest, model: str, *, is_stored: bool) -> dict[str, Any]:
    reasoning = request.reasoning
    text = request.text
    return {
        "id": random_id("resp_", 32),
        "object": "response",
        "created_at": time.time(),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "model": model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "reasoning": {"effort": reasoning.effort if reasoning else None, "summary": None},
        "store": is_stored,
        "temperature": request.temperature,
        "text": {"format": (text and text.format) or {"type": "text"}},
        "tool_choice": request.tool_choice or "auto",
        "tools": request.tools or [],
        "top_p": request.top_p,
        "truncation": "disabled",
        "usage": None,
        "metadata": request.metadata or {},
        "background": bool(request.background),
    }
