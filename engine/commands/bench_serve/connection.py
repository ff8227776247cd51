"""HTTP connection of the load generator: sends requests, and records when tokens arrive.

Each chunk costs one callback and a small parse: there is no queue, and no task wakes until the
response is complete.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from array import array
from dataclasses import dataclass, field
from typing import Any

from engine.commands.bench_serve.http_reader import HttpReader, ResponseError, SseReader

__all__ = ["Answer", "Connection", "ConnectionPool"]

_MAX_ERROR_BODY = 4 << 10
_MAX_COUNT = 1 << 40  # largest plausible token count in a usage
_FIELDS = ("content", "reasoning_content", "reasoning", "tool_calls")


@dataclass(slots=True)
class Answer:
    """Measured response to one request; times are `time.monotonic` seconds.

    Attributes
    ----------
    start : float
        Time just before connecting and sending the request.
    end : float
        Time when the response completed or failed.
    times : array of float
        Arrival time of each chunk that carries tokens.
    num_prompt_tokens, num_output_tokens : int
        Counts from the server's `usage`; -1 without one.
    finish_reason : str
        "" until the server sends one.
    failure, detail : str
        Failure category, from a small fixed set, and its message; "" on success.
    """

    start: float = 0.0
    end: float = 0.0
    times: array[float] = field(default_factory=lambda: array("d"))
    num_prompt_tokens: int = -1
    num_output_tokens: int = -1
    finish_reason: str = ""
    failure: str = ""
    detail: str = ""


class Connection(asyncio.Protocol):
    """Connection that can be reused for further requests.

    Attributes
    ----------
    is_open : bool
    has_received : bool
        Whether any byte of the current response has arrived.
    """

    def __init__(self) -> None:
        self.is_open = False
        self.has_received = False
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[None] | None = None
        self._answer = Answer()
        self._http = HttpReader(0)
        self._sse = SseReader()
        self._error_body = b""
        self._has_ended = False  # whether "[DONE]" has arrived

    async def request(self, data: bytes, answer: Answer, max_body: int) -> None:
        """Send a request, and fill `answer` until the response is complete.

        Raises
        ------
        ResponseError
            If the response is not a complete event stream with status 200.
        """
        self.has_received = False
        if self._transport is None or not self.is_open:
            raise ResponseError("disconnected", "before the request was sent")
        self._answer = answer
        self._http = HttpReader(max_body)
        self._sse = SseReader()
        self._error_body = b""
        self._has_ended = False
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(data)
        await self._done
        if self._http.status != 200:
            raise ResponseError(f"http {self._http.status}", _message(self._error_body))
        if not self._has_ended and not answer.finish_reason:
            raise ResponseError("truncated stream", "it ended without [DONE] or a finish_reason")
        if not answer.times:
            raise ResponseError("no tokens", "the stream had no chunk with text")

    def can_be_kept(self) -> bool:
        """Return whether the connection may be reused."""
        return self.is_open and self._http.complete and self._http.keep_alive

    def close(self) -> None:
        """Close immediately; to the server, the client has disconnected."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self.is_open = True

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        if self._done is None or self._done.done():
            return
        try:
            self._http.end()
        except ResponseError as failure:
            self._end(failure if error is None else ResponseError("disconnected", str(error)))
        else:
            self._end(None)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        self.has_received = True
        if self._done is None or self._done.done():
            self.close()  # unsolicited data: no request is open
            return
        try:
            self._take(self._http.feed(data), now)
        except ResponseError as failure:
            self._end(failure)
        else:
            if self._http.complete:
                self._end(None)

    def _take(self, body: bytes, now: float) -> None:
        http = self._http
        if not body:
            return
        if http.status != 200:
            self._error_body = (self._error_body + body)[:_MAX_ERROR_BODY]
            return
        if not http.content_type.startswith("text/event-stream"):
            raise ResponseError(
                "malformed response", f"no text/event-stream, but {http.content_type[:80]!r}"
            )
        for event in self._sse.feed(body):
            if event == b"[DONE]":
                self._has_ended = True
            else:
                _note(self._answer, event, now)

    def _end(self, failure: ResponseError | None) -> None:
        assert self._done is not None
        if failure is None:
            self._done.set_result(None)
        else:
            self._done.set_exception(failure)
            self.close()


def _note(answer: Answer, event: bytes, now: float) -> None:
    """Add an event's tokens, usage and finish reason to the answer."""
    try:
        chunk = json.loads(event)
        if choices := chunk.get("choices"):
            choice = choices[0]
            if _has_tokens(choice):
                answer.times.append(now)
            if reason := choice.get("finish_reason"):
                answer.finish_reason = str(reason)
        elif "error" in chunk:
            raise ResponseError("error in the stream", _message(event))
        if usage := chunk.get("usage"):
            answer.num_prompt_tokens = _count(usage["prompt_tokens"])
            answer.num_output_tokens = _count(usage.get("completion_tokens", 0))
    except (
        ArithmeticError,
        ValueError,
        TypeError,
        AttributeError,
        LookupError,
        RecursionError,
    ) as error:
        raise ResponseError("malformed response", f"{event[:60]!r}: {error}") from None


def _count(value: Any) -> int:
    """Return a token count from a usage; raise ValueError if it is not plausible."""
    count = int(value)
    if not 0 <= count <= _MAX_COUNT:
        raise ValueError(f"a usage must have numbers from 0 to {_MAX_COUNT}")
    return count


def _has_tokens(choice: dict[str, Any]) -> bool:
    """Return whether a choice carries tokens.

    The text is empty if the tokens do not form a complete character yet. But it is also empty in
    two choices without tokens: the last one, with only the finish_reason, and a chat's first, with
    only the role.
    """
    delta = choice.get("delta")
    if delta is None:
        return bool(choice["text"]) or choice.get("finish_reason") is None
    for name in _FIELDS:
        if delta.get(name):
            return True
    return "content" in delta and "role" not in delta and choice.get("finish_reason") is None


def _message(body: bytes) -> str:
    """Return the message of an error in OpenAI's format, or the start of any other body."""
    try:
        return str(json.loads(body)["error"]["message"])[:300]
    except (ValueError, TypeError, LookupError, RecursionError):
        return body[:200].decode("utf-8", "replace")


class ConnectionPool:
    """Connection pool of one process to one server.

    Parameters
    ----------
    host : str
    port : int
    tls : bool
    """

    def __init__(self, host: str, port: int, *, tls: bool) -> None:
        self._place = host, port
        self._tls = ssl.create_default_context() if tls else None
        self._idle: list[Connection] = []

    async def send(self, data: bytes, answer: Answer, *, max_body: int, timeout: float) -> None:
        """Send a request and await its complete response; failures are recorded in `answer`.

        If the server has closed an idle connection meanwhile, the request is retried once.

        Parameters
        ----------
        data : bytes
            The request: header and body.
        answer : Answer
            Filled in even if the request fails.
        max_body : int
            Maximum bytes of the response body.
        timeout : float
            Maximum seconds in total.
        """
        answer.start = time.monotonic()
        try:
            await asyncio.wait_for(self._send(data, answer, max_body), timeout)
        except asyncio.TimeoutError:
            answer.failure = "timeout"
            answer.detail = f"after {timeout:g} s"
        except ResponseError as failure:
            answer.failure = failure.reason
            answer.detail = str(failure)
        except OSError as error:
            answer.failure = "no connection"
            answer.detail = str(error)
        answer.end = time.monotonic()

    async def _send(self, data: bytes, answer: Answer, max_body: int) -> None:
        while self._idle:
            kept = self._idle.pop()
            try:
                await self._use(kept, data, answer, max_body)
                return
            except ResponseError:
                if kept.has_received or kept.is_open:
                    raise
        host, port = self._place
        loop = asyncio.get_running_loop()
        _, fresh = await loop.create_connection(Connection, host, port, ssl=self._tls)
        await self._use(fresh, data, answer, max_body)

    async def _use(self, connection: Connection, data: bytes, answer: Answer, most: int) -> None:
        try:
            await connection.request(data, answer, most)
        except BaseException:
            connection.close()
            raise
        if connection.can_be_kept():
            self._idle.append(connection)
        else:
            connection.close()

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().close()
