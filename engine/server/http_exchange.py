"""`Exchange`: one HTTP request and its answer, as an ASGI application sees them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, MutableMapping
from typing import Any, Protocol

from starlette.types import ASGIApp, Message

from engine.server.protocol.errors import APIError

__all__ = ["Connection", "Exchange", "response_head"]

_PHRASES = {
    200: "OK",
    204: "No Content",
    304: "Not Modified",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    413: "Content Too Large",
    414: "URI Too Long",
    415: "Unsupported Media Type",
    429: "Too Many Requests",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    501: "Not Implemented",
    503: "Service Unavailable",
    505: "HTTP Version Not Supported",
    529: "Overloaded",
}
_log = logging.getLogger("engine.server.http")

_Headers = Iterable[tuple[bytes, bytes]]


class Connection(Protocol):
    """What an exchange needs of its connection."""

    drained: asyncio.Event | None
    """Set once the client has read enough of what was sent; None if it has."""

    def write(self, data: bytes) -> None:
        """Send bytes, unless the connection is closing."""

    def body_taken(self) -> None:
        """Note that the application has taken the received part of the body."""

    def answered(self, exchange: Exchange) -> None:
        """Note that the answer is complete."""

    def default_headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers of every response."""

    def abort(self) -> None:
        """Close at once."""


def response_head(status: int, headers: _Headers) -> bytes:
    """Return a status line and headers.

    Raises
    ------
    RuntimeError
        If a header contains a line break.
    """
    lines = [f"HTTP/1.1 {status} {_PHRASES.get(status, '')}".encode("ascii")]
    lines += [name + b": " + value for name, value in headers]
    head = b"\r\n".join(lines)
    if head.count(b"\n") != len(lines) - 1 or head.count(b"\r") != len(lines) - 1:
        raise RuntimeError("a response header must not contain line breaks; got one that does")
    return head + b"\r\n\r\n"


class Exchange:
    """One request and its answer.

    Parameters
    ----------
    connection : Connection
    scope : dict
        ASGI's description of the request.
    keep_alive : bool
        Whether the client would send further requests on this connection.
    expects_continue : bool
        Whether the client waits for "100 Continue" before it sends the body.

    Attributes
    ----------
    num_buffered : int
        Bytes of the body that the application has not taken.
    is_started, is_complete : bool
        Of the answer.
    is_received : bool
        Whether the whole request has arrived.
    """

    def __init__(
        self,
        connection: Connection,
        scope: MutableMapping[str, Any],
        *,
        keep_alive: bool,
        expects_continue: bool,
    ) -> None:
        self.scope = scope
        self.keep_alive = keep_alive
        self.is_started = False
        self.is_complete = False
        self.is_received = False
        self.num_buffered = 0
        self._connection = connection
        self._expects_continue = expects_continue
        self._parts: list[bytes] = []
        self._event = asyncio.Event()
        self._is_gone = False
        self._error: APIError | None = None
        self._is_head = scope["method"] == "HEAD"
        self._is_chunked = False
        self._num_left: int | None = None  # bytes of the answer's body; None: not declared

    # ---- called by the connection

    def feed(self, data: bytes) -> None:
        """Add a part of the body."""
        self._parts.append(data)
        self.num_buffered += len(data)
        self._event.set()

    def end(self) -> None:
        """Note that the request is complete."""
        self.is_received = True
        self._event.set()

    def fail(self, error: APIError) -> None:
        """Raise `error` where the application waits for the body."""
        self._error = error
        self._event.set()

    def disconnect(self) -> None:
        """Note that the client has gone."""
        self._is_gone = True
        self._parts.clear()
        self._event.set()

    async def run(self, app: ASGIApp) -> None:
        """Let the application answer; if it fails, send a 500 or close the connection."""
        try:
            await app(self.scope, self.receive, self.send)
            if not (self.is_complete or self._is_gone or self._error):
                raise RuntimeError("the application returned without completing its response")
        except asyncio.CancelledError:
            self._connection.abort()
            raise
        except Exception as error:
            if not self._is_gone:
                _log.error("a response failed", exc_info=error)
                await self._end_failed()
        else:
            if not self.is_complete:
                self._connection.abort()

    async def _end_failed(self) -> None:
        if self.is_complete:
            return  # the client may have sent its next request
        if self.is_started:
            self._connection.abort()
            return
        headers = [(b"content-length", b"0"), (b"connection", b"close")]
        await self.send({"type": "http.response.start", "status": 500, "headers": headers})
        await self.send({"type": "http.response.body"})

    # ---- called by the application

    async def receive(self) -> Message:
        """Return the next part of the body, or "http.disconnect"."""
        if self._expects_continue and not self._parts and not self.is_started:
            self._connection.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._expects_continue = False
        if not (self._is_gone or self.is_complete):
            await self._event.wait()
            self._event.clear()
        if self._error is not None and not self.is_started:
            raise self._error
        if self._is_gone or self.is_complete or self._error is not None:
            self._event.set()  # whoever asks again is answered, too
            return {"type": "http.disconnect"}
        body = b"".join(self._parts)
        self._parts.clear()
        self.num_buffered = 0
        self._connection.body_taken()
        return {"type": "http.request", "body": body, "more_body": not self.is_received}

    async def send(self, message: Message) -> None:
        """Send the head or a part of the body of the answer."""
        drained = self._connection.drained
        if drained is not None and not self._is_gone:
            await drained.wait()
        if self._is_gone:
            return
        kind = message["type"]
        wanted = "http.response.body" if self.is_started else "http.response.start"
        if kind != wanted or self.is_complete:
            raise RuntimeError(f"the next message must be {wanted!r}; got {kind!r}")
        if self.is_started:
            self._send_body(message.get("body", b""), is_last=not message.get("more_body", False))
        else:
            self._send_head(message["status"], message.get("headers", ()))

    def _send_head(self, status: int, given: _Headers) -> None:
        headers = self._connection.default_headers()
        for name, value in given:
            if name == b"content-length":
                self._num_left = int(value)
            elif name == b"connection" and value.lower() == b"close":
                self.keep_alive = False
                continue
            headers.append((name, value))
        # What was not read of a body could not be told from the next request.
        self.keep_alive &= self.is_received
        has_body = not self._is_head and status not in (204, 304)
        if not has_body:
            self._num_left = 0
        elif self._num_left is None:
            self._is_chunked = self.scope["http_version"] == "1.1"
            self.keep_alive &= self._is_chunked
        if self._is_chunked:
            headers.append((b"transfer-encoding", b"chunked"))
        if not self.keep_alive:
            headers.append((b"connection", b"close"))
        self._connection.write(response_head(status, headers))
        self.is_started = True

    def _send_body(self, data: bytes, *, is_last: bool) -> None:
        if self._is_head:
            data = b""
        if self._num_left is not None:
            self._num_left -= len(data)
            if self._num_left < 0 or (is_last and self._num_left):
                raise RuntimeError("the body of a response must have content-length bytes")
        if not self._is_chunked:
            self._connection.write(data)
        else:
            chunk = b"%x\r\n%b\r\n" % (len(data), data) if data else b""
            self._connection.write(chunk + b"0\r\n\r\n" if is_last else chunk)
        if is_last:
            self.is_complete = True
            self._event.set()
            self._connection.answered(self)
