"""/v1/responses: OpenAI's Responses API, with stored and background responses."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Iterable
from typing import Any, Literal, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from engine.server.agent_stream import Answered, begin_chat, chat_request, named_frame, num_tokens
from engine.server.event_log import EventLog
from engine.server.json_response import JsonResponse
from engine.server.limits import check_model, check_query, decoded, read_struct
from engine.server.openapi import Endpoint
from engine.server.protocol.annotations import invalid, wrong_choice
from engine.server.protocol.chat import ChatCompletionRequest
from engine.server.protocol.errors import APIError, api_error, renamed_params
from engine.server.protocol.response_items import ItemPage, ItemQuery, page_of
from engine.server.protocol.responses import ResponsesRequest, own_items, to_chat
from engine.server.protocol.responses_events import ResponseBuilder, ResponseObject
from engine.server.sse import EventStream, unless_disconnected
from engine.server.stored_responses import (
    ResponseStore,
    StoredResponse,
    Turn,
    encoded,
    joined,
)

__all__ = ["ENDPOINTS", "routes"]

_STORED = "/v1/responses/{response_id}"
_COUNT = "/v1/responses/input_tokens"
_CANCEL = f"{_STORED}/cancel"
_ITEMS = f"{_STORED}/input_items"
_T = TypeVar("_T", bound=msgspec.Struct)
_log = logging.getLogger("engine.server")
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
_INCLUDED = ("reasoning.encrypted_content",)  # no effect: reasoning is plain text
_IGNORED = ("include", "include[]", "include_obfuscation")  # parameters of the URL


class Retrieval(msgspec.Struct, forbid_unknown_fields=True):
    """Query of GET /v1/responses/{response_id}."""

    stream: bool = False
    starting_after: int = -1


class _Output(msgspec.Struct):
    output: list[msgspec.Raw]


class DeletedResponse(msgspec.Struct):
    """Response body of DELETE /v1/responses/{response_id}."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class InputTokens(msgspec.Struct):
    """Response body of POST /v1/responses/input_tokens."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


ENDPOINTS = (
    Endpoint(
        "post", "/v1/responses", "Answer an input", ResponsesRequest, ResponseObject, streams=True
    ),
    Endpoint("post", _COUNT, "Count the tokens of an input", ResponsesRequest, InputTokens),
    Endpoint(
        "get",
        _STORED,
        "A stored response",
        response=ResponseObject,
        streams=True,
        query=("stream", "starting_after"),
    ),
    Endpoint(
        "get",
        _ITEMS,
        "Input items of a stored response",
        response=ItemPage,
        query=("limit", "order", "after"),
    ),
    Endpoint("delete", _STORED, "Delete a stored response", response=DeletedResponse),
    Endpoint("post", _CANCEL, "Cancel a background response", response=ResponseObject),
)


def routes() -> list[Route]:
    """Return the routes of this module."""
    return [
        Route("/v1/responses", create_response, methods=["POST"]),
        Route(_COUNT, count_input_tokens, methods=["POST"]),
        Route(_STORED, get_response, methods=["GET"]),
        Route(_ITEMS, list_input_items, methods=["GET"]),
        Route(_STORED, delete_response, methods=["DELETE"]),
        Route(_CANCEL, cancel_response, methods=["POST"]),
    ]


async def create_response(request: Request) -> Response:
    """Handle POST /v1/responses."""
    body = await read_struct(request, ResponsesRequest)
    model = check_model(body.model, request)
    chat, previous = await _chat(request, body)
    is_stored = request.app.state.responses.is_enabled and body.store is not False
    builder = ResponseBuilder(body, model, is_stored=is_stored)
    stream = await begin_chat(request, chat, builder.response["id"], _FIELDS)
    keep = _Keeper(request, body, builder, previous) if is_stored else None
    answer = _Answer(request, Answered(stream), builder, keep)
    if body.background:
        assert keep is not None  # `to_chat` refuses a background response that is not stored
        stored = keep.start(answer, streams=bool(body.stream))
        return (
            JsonResponse(stored.body) if stored.log is None else _followed(request, stored.log, -1)
        )
    if body.stream:
        interval = request.app.state.config.sse_keep_alive
        frames = answer.frames()
        error_frame = answer.error_frame
        return EventStream(frames, keep_alive=interval, error_frame=error_frame, last=b"")
    await unless_disconnected(request.receive, answer.whole())
    return JsonResponse(builder.response)


async def count_input_tokens(request: Request) -> Response:
    """Handle POST /v1/responses/input_tokens: count the tokens of the prompt."""
    body = await read_struct(request, ResponsesRequest)
    check_model(body.model, request)
    chat, _ = await _chat(request, body)
    with renamed_params(_FIELDS):
        prompt = await asyncio.to_thread(request.app.state.chat.render, chat)
    return JsonResponse(InputTokens(len(prompt["prompt_token_ids"])))


async def _chat(
    request: Request, body: ResponsesRequest
) -> tuple[ChatCompletionRequest, Turn | None]:
    """Return the chat request, and the turn it follows; `body` gets the items it refers to."""
    store: ResponseStore = request.app.state.responses
    previous = None
    earlier: list[Any] = []
    if store.is_enabled and body.previous_response_id is not None:
        previous = _previous_turn(request, body.previous_response_id)
        earlier = await _items(request, previous)
    if isinstance(body.input, list):
        body.input = await _dereferenced(request, body.input)
    return chat_request(to_chat(body, earlier, can_store=store.is_enabled)), previous


async def _dereferenced(request: Request, items: list[Any]) -> list[Any]:
    """Return input items, each `item_reference` replaced by the stored item that it names."""
    store: ResponseStore = request.app.state.responses
    limit = request.app.state.config.max_body_bytes
    size = 0
    found = []
    for index, item in enumerate(items):
        if isinstance(item, dict) and item.get("type") == "item_reference":
            name = str(item.get("id"))
            owner = store.owner(request.state.key, name)
            if owner is None:
                reason = "" if store.is_enabled else ": none are stored (max_stored_responses)"
                message = f"input[{index}].id must be of an item in a stored response's output"
                raise APIError(404, f"{message}; got {name[:100]!r}{reason}", param="input")
            size += len(owner.body)
            if size > limit:
                message = f"input must refer to responses of at most {limit} bytes"
                raise APIError(400, f"{message} (max_body_bytes); got more", param="input")
            output = (await decoded(owner.body, _Output)).output
            item = msgspec.json.decode(output[owner.item_ids.index(name)])
        found.append(item)
    return found


# ---- stored responses


async def get_response(request: Request) -> Response:
    """Handle GET /v1/responses/{response_id}."""
    stored = _stored(request)
    fields = _query(request, Retrieval)
    if not fields.stream:
        if fields.starting_after != -1:
            message = f"starting_after needs stream=true; got {fields.starting_after}"
            raise APIError(400, message, param="starting_after")
        return JsonResponse(stored.body)
    if stored.log is None:
        message = f"the response {stored.id!r} was not made with background and stream"
        raise APIError(400, f"{message}, so it has no events", param="stream")
    after = fields.starting_after
    if not -1 <= after < stored.log.end:
        message = f"starting_after must be the number of an event, below {stored.log.end}"
        raise APIError(400, f"{message}; got {after}", param="starting_after")
    return _followed(request, stored.log, after)


async def list_input_items(request: Request) -> Response:
    """Handle GET /v1/responses/{response_id}/input_items."""
    stored = _stored(request)
    fields = _query(request, ItemQuery)
    turn = stored.turn
    assert turn is not None  # every stored response has its input
    items = [] if turn.previous is None else await _items(request, turn.previous)
    items += await decoded(b"[" + turn.data + b"]", list[Any])
    num_output = len(msgspec.json.decode(stored.body, type=_Output).output)
    if stored.is_finished:
        items = items[: len(items) - num_output]
    return JsonResponse(page_of(items, stored.id, fields))


async def delete_response(request: Request) -> Response:
    """Handle DELETE /v1/responses/{response_id}; one in progress is cancelled first."""
    stored = _stored(request)
    await _cancel(stored)
    request.app.state.responses.delete(request.state.key, stored.id)
    return JsonResponse(DeletedResponse(stored.id))


async def cancel_response(request: Request) -> Response:
    """Handle POST /v1/responses/{response_id}/cancel; one that has finished stays as it is."""
    stored = _stored(request)
    if stored.job is None:
        message = f"the response {stored.id!r} was not made with background and has finished"
        raise APIError(400, message, param="response_id")
    await _cancel(stored)
    return JsonResponse(stored.body)


def _stored(request: Request) -> StoredResponse:
    """Return the response that the path names; raise an `APIError` (404) if there is none."""
    store: ResponseStore = request.app.state.responses
    name = request.path_params["response_id"]
    found = store.find(request.state.key, name)
    if found is None:
        reason = "" if store.is_enabled else ": no responses are stored (max_stored_responses)"
        message = f"the response {name[:100]!r} does not exist{reason}"
        raise APIError(404, message, param="response_id")
    return found


def _previous_turn(request: Request, name: str) -> Turn:
    stored = request.app.state.responses.find(request.state.key, name)
    code = "previous_response_not_found"
    if stored is None:
        message = f"previous_response_id must be of a stored response; got {name[:100]!r}"
    elif stored.status in ("completed", "incomplete"):
        turn: Turn = stored.turn
        return turn
    else:
        message = f"previous_response_id must be of a completed response; it is {stored.status}"
        code = "invalid_previous_response"
    raise APIError(400, message, param="previous_response_id", code=code)


async def _items(request: Request, turn: Turn) -> list[Any]:
    """Return the items of a conversation up to the end of `turn`."""
    limit = request.app.state.config.max_body_bytes
    data = turn.joined(limit)
    if data is None:
        message = f"previous_response_id must lead to at most {limit} bytes (max_body_bytes)"
        raise APIError(400, f"{message}; got more", param="previous_response_id")
    return await decoded(data, list[Any])


async def _cancel(stored: StoredResponse) -> None:
    if stored.job is not None and not stored.is_finished:
        stored.job.cancel()
        await asyncio.wait([stored.job])


def _query(request: Request, kind: type[_T]) -> _T:
    """Return a request's query as a struct, after checking that all of it is supported."""
    check_query(request, *_IGNORED, *kind.__struct_fields__)
    given: dict[str, Any] = {}
    for name, value in request.query_params.multi_items():
        if name in ("include", "include[]") and value not in _INCLUDED:
            message = f"include must be empty; got {value[:50]!r}"
            raise APIError(400, message, param="include")
        if name == "include_obfuscation" and value.lower() != "false":
            message = "include_obfuscation must be false: events are not obfuscated"
            raise APIError(400, f"{message}; got {value[:50]!r}", param=name)
        if name not in _IGNORED:
            given[name] = value
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$.")
        name = path.rstrip("`")
        wanted = wrong_choice(reason, kind, f".{name}")
        wanted = wanted or f"{invalid(reason)}; got {given[name][:50]!r}"
        raise APIError(400, f"{name} {wanted}", param=name) from None


def _followed(request: Request, log: EventLog, after: int) -> EventStream:
    """Return a stream of the events behind number `after`."""

    def error_frame(error: APIError) -> bytes:
        fields = {"code": error.code, "message": error.message, "param": error.param}
        return named_frame({"type": "error", "sequence_number": log.end, **fields})

    interval = request.app.state.config.sse_keep_alive
    return EventStream(log.follow(after), keep_alive=interval, error_frame=error_frame, last=b"")


class _Keeper:
    """Stores one response of a request when it has finished.

    Parameters
    ----------
    request : Request
    body : ResponsesRequest
    builder : ResponseBuilder
    previous : Turn or None
        The turn that the response follows.
    """

    def __init__(
        self,
        request: Request,
        body: ResponsesRequest,
        builder: ResponseBuilder,
        previous: Turn | None,
    ) -> None:
        self._store: ResponseStore = request.app.state.responses
        self._slot: contextlib.ExitStack = request.state.slot
        self._key = request.state.key
        self._input = encoded(own_items(body))  # smaller than the items themselves
        self._builder = builder
        self._previous = previous
        self._stored: StoredResponse | None = None

    def keep(self) -> None:
        """Store the response as it is now."""
        response = self._builder.response
        turn = Turn(joined([self._input, encoded(response["output"])]), self._previous)
        if self._stored is None:
            self._stored = StoredResponse(response)
        else:
            self._stored.update(response)
        self._store.put(self._key, self._stored, turn)

    def start(self, answer: _Answer, *, streams: bool) -> StoredResponse:
        """Compute the response in the background; it takes over the request's slot."""
        response = self._builder.response
        response["status"] = "queued"
        stored = self._stored = StoredResponse(response)
        stored.turn = Turn(self._input, self._previous)
        self._store.begin(self._key, stored)
        if streams:
            stored.log = EventLog()
            self._log(self._builder.start())
        slot = self._slot.pop_all()
        response["status"] = "in_progress"
        stored.job = asyncio.ensure_future(self._run(answer))
        stored.job.add_done_callback(lambda _: self._end(stored, slot))
        return stored

    async def _run(self, answer: _Answer) -> None:
        stored = self._stored
        assert stored is not None
        stored.update(self._builder.response)
        try:
            if stored.log is None:
                await answer.whole()
                return
            async with contextlib.aclosing(answer.rest()) as frames:
                async for frame in frames:
                    self._store.log(self._key, stored, frame)
        except Exception as error:
            found = api_error(error)
            if found.status == 500 and not isinstance(error, APIError):
                _log.error("the response %s failed", stored.id, exc_info=error)
            frame = answer.error_frame(found)
            self.keep()
            if stored.log is not None:
                self._store.log(self._key, stored, frame)

    def _end(self, stored: StoredResponse, slot: contextlib.ExitStack) -> None:
        """Release the slot; store what a cancelled response has."""
        slot.close()
        if not stored.is_finished:
            self._log(self._builder.cancel())
            self.keep()
        if stored.log is not None:
            stored.log.close()

    def _log(self, events: Iterable[dict[str, Any]]) -> None:
        """Log events, if the response is streamed."""
        frames = _frames_of(events)
        if self._stored is not None and self._stored.log is not None:
            self._store.log(self._key, self._stored, frames)


class _Answer:
    """Response to one request, complete or as SSE frames.

    Parameters
    ----------
    request : Request
    answered : Answered
    builder : ResponseBuilder
    keeper : _Keeper or None
        Stores the response when it is complete.
    """

    def __init__(
        self,
        request: Request,
        answered: Answered,
        builder: ResponseBuilder,
        keeper: _Keeper | None,
    ) -> None:
        self._request = request
        self._answered = answered
        self._builder = builder
        self._keeper = keeper
        self._start = b""  # first frames, built before the stream starts

    async def whole(self) -> None:
        """Build the complete response."""
        await self._answered.whole(self._builder)
        await self._ending()

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Yield the frames; errors that set the HTTP status are raised before the first."""
        self._start = _frames_of(self._builder.start())
        async with contextlib.aclosing(self.rest()) as frames:
            async for frame in frames:
                yield frame

    async def rest(self) -> AsyncGenerator[bytes, None]:
        """Yield the frames behind those of the start."""
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
        events = list(self._builder.finish(reason or "stop", usage))
        if self._keeper is not None:
            self._keeper.keep()
        return events


def _frames_of(events: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(map(named_frame, events))
