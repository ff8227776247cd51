"""HTTP/1.1 for uvicorn's server: one request at a time, with limits and deadlines for everything.

uvicorn's own protocol has no limits: it waits for ever for a request that does not come, for the
rest of a body that nobody reads and for a client that does not read; and it stores trailers and
pipelined requests without a bound. Here

- every byte that is not part of a body counts: the head of a request, blank lines before it,
  framing of chunks and trailers. Trailers and chunk extensions are discarded;
- what arrives after a complete request is not parsed before the answer is sent;
- a request has one deadline, from its first byte to its last;
- after an answer to a request that did not arrive completely the connection is closed.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import re
import secrets
import socket
from collections import deque
from collections.abc import Callable
from typing import Any, cast
from urllib.parse import unquote_to_bytes

import httptools
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Scope

from engine.server.access_log import log_request
from engine.server.connection_pool import ALWAYS_SERVED, ConnectionPool
from engine.server.hosts import check_one_host, is_same_host
from engine.server.http_exchange import Exchange, response_head
from engine.server.protocol.errors import APIError, error_body, error_status, is_anthropic
from engine.server.server_config import ServerConfig

__all__ = ["http_protocol"]

_MAX_HEADERS = 128
_MAX_TARGET = 8192  # bytes of a request's target
_MAX_BUFFERED = 1 << 16  # bytes of a body that the application has not taken, before reading pauses
_SLICE = 4096  # bytes of a chunked body that are parsed between two checks
_MAX_FRAMING = 8  # bytes of framing per byte of a chunked body: a chunk of one byte has 5
_MAX_STEPS = 32  # in one round of the event loop; see `_Rounds`
_URGENT = tuple(f"GET {path} ".encode("ascii") for path in ALWAYS_SERVED)
_SURPLUS_SECONDS = 2.0  # a surplus connection's time to send its request
_LINGER_SECONDS = 2.0  # time for a client to read an answer before it has sent all of its request
_SHUTDOWN_SECONDS = 1.0  # time for an idle client to end TLS when the server ends
_RETRY = {"Retry-After": "1"}

_IDLE, _RECEIVING, _ANSWERING, _LINGERING, _CLOSED = range(5)

_log = logging.getLogger("engine.server.http")


class _Rounds:
    """Steps of all connections (parse a request, begin to answer it), taken in rounds.

    Thousands of requests may arrive at once. The event loop would read and answer them all before
    it looked at any other connection; here it does so after each round.
    """

    def __init__(self) -> None:
        self._steps: deque[Callable[[], None]] = deque()
        self._is_scheduled = False

    @property
    def is_crowded(self) -> bool:
        """Whether more steps wait than a round takes."""
        return len(self._steps) > _MAX_STEPS

    def add(self, loop: asyncio.AbstractEventLoop, step: Callable[[], None]) -> None:
        """Take a step after all earlier ones."""
        self._steps.append(step)
        if not self._is_scheduled:
            self._is_scheduled = True
            loop.call_soon(self._take, loop)

    def _take(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_scheduled = False
        steps = [self._steps.popleft() for _ in range(min(len(self._steps), _MAX_STEPS))]
        if self._steps:
            self._is_scheduled = True
            loop.call_soon(self._take, loop)
        for step in steps:
            step()


class _HttpConnection(asyncio.Protocol):
    """One connection. Its phases:

    idle (no byte of the next request) -> receiving -> answering (the whole request has arrived) ->
    idle, or closed. An answer that is complete while the request still arrives leads to lingering:
    the rest is discarded for a moment, so that the client can read the answer before the
    connection is closed.
    """

    settings: ServerConfig  # set by `http_protocol`
    pool: ConnectionPool
    _rounds: _Rounds

    def __init__(
        self,
        config: Any,
        server_state: Any,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        if not config.loaded:
            config.load()
        self._app: ASGIApp = config.loaded_app
        self._root_path: str = config.root_path
        self._server_state = server_state
        self._app_state = app_state
        self._loop = _loop or asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._parser = httptools.HttpRequestParser(self)
        self._phase = _IDLE
        self._exchange: Exchange | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None
        self.drained: asyncio.Event | None = None  # set once the client has read enough
        self._is_surplus = False
        self._is_reading_paused = False
        self._is_late = False
        self._is_fresh = True  # no request has been answered
        self._held = bytearray()  # arrived after a complete request, not parsed yet
        self._begin_message()

    def _begin_message(self) -> None:
        """Forget the previous request."""
        self._began_at = self._loop.time()
        self._is_in_head = True
        self._is_upgrade = False
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._num_head_bytes = 0
        self._last_bytes = b""  # the last three of the head so far
        self._num_left: int | None = 0  # bytes of the body still to come; None: chunked
        self._num_body_bytes = 0
        self._num_framing_bytes = 0
        self._num_gap_bytes = 0  # since the last byte of the body

    # ---- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        _send_at_once(transport.get_extra_info("socket"))
        self._server_state.connections.add(self)
        self._is_surplus = not self.pool.enter(self)
        self.pool.wait(self)
        self._set_timer(self._receive_seconds(), self._end_slow_request)

    def connection_lost(self, exc: Exception | None) -> None:
        self._phase = _CLOSED
        self._set_timer()
        self.resume_writing()
        self._held.clear()
        self._server_state.connections.discard(self)
        self.pool.leave(self)
        if self._exchange is not None:
            self._exchange.disconnect()
            self._exchange = None

    def eof_received(self) -> None:
        """Treat the end of what the client sends as its end: the transport closes itself."""

    def data_received(self, data: bytes) -> None:
        if self._phase == _ANSWERING or self._held:
            self._hold(data)
        elif self._phase == _IDLE and self._rounds.is_crowded and not data.startswith(_URGENT):
            self._held += data
            self.pool.serve(self)  # it is the client that waits
            self._transport.pause_reading()
            self._rounds.add(self._loop, self._feed_queued)
        else:
            self._feed(data)

    def pause_writing(self) -> None:
        self.drained = asyncio.Event()
        self.pool.stall(self)
        seconds = self.settings.send_timeout
        self._send_timer = self._loop.call_later(seconds, self._end_slow_reader)

    def resume_writing(self) -> None:
        if self.drained is not None:
            self.drained.set()
            self.drained = None
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None
        self.pool.resume(self)

    # ---- called by uvicorn's server and the pool

    def shutdown(self) -> None:
        """Close after the answer in progress, if there is one."""
        if self._exchange is None:
            self._close()
            self._set_timer(_SHUTDOWN_SECONDS, self._transport.abort)
        else:
            self._exchange.keep_alive = False

    def make_room(self) -> None:
        """Close soon, as the server has no room for a client that keeps it waiting."""
        if self._phase in (_LINGERING, _CLOSED) or self.drained is not None:
            self.abort()
        elif self._phase == _IDLE and not self._is_fresh:
            self._close()
        else:
            self._refuse(self._is_full())

    def abort(self) -> None:
        """Close at once; what was not sent yet is lost."""
        self._phase = _CLOSED
        self._transport.abort()

    # ---- what arrives

    def _feed(self, data: bytes) -> None:
        """Parse `data` in parts small enough that each limit holds exactly."""
        view = memoryview(data)
        at = 0
        while at < len(data) and self._phase in (_IDLE, _RECEIVING):
            if self._phase == _IDLE:
                self._phase = _RECEIVING
                self._began_at = self._loop.time()
                self._set_timer(self._receive_seconds(), self._end_slow_request)
            size = self._head_part(data, at) if self._is_in_head else self._body_part(data, at)
            if not size:
                limit = self.settings.max_header_bytes
                self._refuse(APIError(431, f"the headers must have at most {limit} bytes"))
                return
            at += self._parse(view[at : at + size])
        if at < len(data) and self._phase == _ANSWERING:
            self._hold(data[at:])

    def _head_part(self, data: bytes, at: int) -> int:
        """Return how many bytes to parse next: up to the head's end, and to the limit."""
        end = min(len(data), at + self.settings.max_header_bytes - self._num_head_bytes)
        across = (self._last_bytes + data[at : at + 3]).find(b"\r\n\r\n")
        if across >= 0:
            end = min(end, at + across + 4 - len(self._last_bytes))
        elif (found := data.find(b"\r\n\r\n", at, end)) >= 0:
            end = found + 4
        self._last_bytes = (self._last_bytes + data[max(at, end - 3) : end])[-3:]
        self._num_head_bytes += end - at
        return end - at

    def _body_part(self, data: bytes, at: int) -> int:
        rest = len(data) - at
        return min(rest, _SLICE if self._num_left is None else self._num_left)

    def _parse(self, part: memoryview) -> int:
        """Parse a part; return how many of its bytes are done."""
        is_body = not self._is_in_head
        before = self._num_body_bytes
        try:
            self._parser.feed_data(part)
        except httptools.HttpParserUpgrade as error:
            if self._is_upgrade:
                self._parse_body_anew()
            return cast(int, error.args[0])
        except httptools.HttpParserCallbackError as error:
            raise error.__context__ or error from None
        except httptools.HttpParserError as error:
            self._refuse(APIError(400, f"the request is not valid HTTP/1.1: {error}"))
        if is_body and self._phase == _RECEIVING:
            self._count_framing(len(part), self._num_body_bytes - before)
        return len(part)

    def _parse_body_anew(self) -> None:
        """Parse the body of a request with an Upgrade header, which is not granted.

        httptools would skip it, so it is parsed by a parser that has not seen the header.
        """
        self._is_upgrade = False
        length = self._num_left
        framing = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
        self._parser = httptools.HttpRequestParser(self)
        self._parser.feed_data(f"POST / HTTP/1.1\r\n{framing}\r\n\r\n".encode("ascii"))

    def _count_framing(self, size: int, num_body_bytes: int) -> None:
        """Limit what is not part of the body: in all, and since the last byte of the body."""
        framing = size - num_body_bytes
        self._num_framing_bytes += framing
        self._num_gap_bytes = 0 if num_body_bytes else self._num_gap_bytes + framing
        limit = self.settings.max_header_bytes
        most = limit + _MAX_FRAMING * self._num_body_bytes
        if self._num_gap_bytes > limit or self._num_framing_bytes > most:
            message = f"trailers and chunk extensions must have at most {limit} bytes"
            self._refuse(APIError(431, message))

    def _hold(self, data: bytes) -> None:
        """Keep bytes of the next request until the answer is sent; too many end the connection."""
        self._held += data
        if len(self._held) > self.settings.max_header_bytes:
            self._held.clear()
            if self._exchange is not None:
                self._exchange.keep_alive = False

    def _feed_queued(self) -> None:
        if self._phase == _IDLE and not self._transport.is_closing():
            self.pool.wait(self)
            self._transport.resume_reading()
            self._feed_held()

    def _feed_held(self) -> None:
        data = bytes(self._held)
        self._held.clear()
        self._feed(data)

    # ---- called by the parser

    def on_message_begin(self) -> None:
        if self._phase == _ANSWERING and self._exchange is not None:
            # It came in the same part as the end of a chunked body, and is not answered.
            self._exchange.keep_alive = False

    def on_url(self, url: bytes) -> None:
        if self._phase != _RECEIVING or not self._is_in_head:
            return
        self._url += url
        if len(self._url) > _MAX_TARGET:
            message = f"the request's target must have at most {_MAX_TARGET} bytes"
            self._refuse(APIError(414, message))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._phase != _RECEIVING or not self._is_in_head:
            return  # a trailer
        self._headers.append((name.lower(), value))
        if len(self._headers) > _MAX_HEADERS:
            self._refuse(APIError(431, f"a request must have at most {_MAX_HEADERS} headers"))

    def on_headers_complete(self) -> None:
        if self._phase != _RECEIVING or not self._is_in_head:
            return
        self._is_in_head = False
        try:
            self._begin_exchange()
        except APIError as error:
            self._refuse(error)

    def on_body(self, data: bytes) -> None:
        if self._phase != _RECEIVING or self._exchange is None:
            return
        self._num_body_bytes += len(data)
        if self._num_left is not None:
            self._num_left -= len(data)
        if self._num_body_bytes > self.settings.max_body_bytes:
            limit = self.settings.max_body_bytes
            self._refuse(APIError(413, f"the body must have at most {limit} bytes"))
            return
        self._exchange.feed(data)
        self._update_reading()

    def on_message_complete(self) -> None:
        if self._phase != _RECEIVING or self._exchange is None or self._is_upgrade:
            return
        self._phase = _ANSWERING
        self._set_timer()
        self.pool.serve(self)
        self._exchange.end()

    # ---- requests

    def _begin_exchange(self) -> None:
        """Check the head of a request, and let the application answer it.

        Raises
        ------
        APIError
            If the request cannot be served.
        """
        version = self._parser.get_http_version()
        if version not in ("1.0", "1.1"):
            raise APIError(505, f"the version must be HTTP/1.1 or 1.0; got {version[:10]}")
        check_one_host(self._headers, version)
        self._num_left = _body_length(self._headers, version)
        self._is_upgrade = self._parser.should_upgrade() and self._num_left != 0
        scope = self._scope(version)
        scope.update(self._target())
        is_open = scope["path"].removeprefix(self._root_path) in ALWAYS_SERVED
        if self._is_surplus:
            self._is_surplus = not self.pool.promote(self)
        if self._is_surplus and not is_open:
            raise self._is_full()
        expects = any(n == b"expect" and v.lower() == b"100-continue" for n, v in self._headers)
        is_new = version == "1.1"
        self._exchange = exchange = Exchange(
            self,
            scope,
            keep_alive=is_new and self._parser.should_keep_alive() and not self._is_surplus,
            expects_continue=is_new and expects,
        )
        if is_open:
            self._start(exchange)
        else:
            self._rounds.add(self._loop, functools.partial(self._start, exchange))

    def _start(self, exchange: Exchange) -> None:
        task = self._loop.create_task(exchange.run(self._app))
        self._server_state.tasks.add(task)
        task.add_done_callback(self._server_state.tasks.discard)

    def _scope(self, version: str) -> Scope:
        transport = self._transport
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": version,
            "method": self._parser.get_method().decode("ascii"),
            "scheme": "https" if transport.get_extra_info("sslcontext") else "http",
            "server": _address(transport.get_extra_info("sockname")),
            "client": _address(transport.get_extra_info("peername")),
            "root_path": self._root_path,
            "headers": self._headers,
            "state": self._app_state.copy(),
        }

    def _target(self) -> Scope:
        """Return the parts of the scope that are in the request's target."""
        try:
            url = httptools.parse_url(self._url)
            raw_path = url.path or b"/"
        except httptools.HttpParserInvalidURLError:
            raise APIError(400, "the request's target must be a valid URL; got another") from None
        if url.schema is not None:
            self._check_authority()
        return {
            "path": self._root_path + unquote_to_bytes(raw_path).decode("utf-8", "replace"),
            "raw_path": self._root_path.encode("ascii") + raw_path,
            "query_string": url.query or b"",
        }

    def _check_authority(self) -> None:
        """Check that a target with a host ("GET http://host/path") agrees with the Host header."""
        authority = re.split(rb"[/?#]", self._url.partition(b"://")[2])[0].decode("latin-1")
        given = [value.decode("latin-1") for name, value in self._headers if name == b"host"]
        if not given:
            self._headers.append((b"host", authority.encode("latin-1")))
            check_one_host(self._headers, "1.1")
        elif not is_same_host(authority, given[0]):
            raise APIError(400, "the request's target must have the host of the Host header")

    # ---- answers

    def write(self, data: bytes) -> None:
        """Send bytes, unless the connection is closing."""
        if self._phase != _CLOSED and not self._transport.is_closing():
            self._transport.write(data)

    def default_headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers of every response: the date."""
        return list(self._server_state.default_headers)

    def body_taken(self) -> None:
        """Note that the application has taken the received part of the body."""
        self._update_reading()

    def answered(self, exchange: Exchange) -> None:
        """Wait for the next request, or close."""
        self._server_state.total_requests += 1
        self._exchange = None
        if self._phase == _CLOSED:
            return
        if self._phase != _ANSWERING:
            self._linger()
        elif not exchange.keep_alive:
            self._close()
        else:
            self._phase = _IDLE
            self._is_fresh = False
            self._begin_message()
            self.pool.wait(self)
            self._set_timer(self.settings.timeout_keep_alive, self._close)
            if self._held:
                self._loop.call_soon(self._feed_held)

    def _refuse(self, error: APIError) -> None:
        """Answer with an error and read no more; the application does so if it waits for a body."""
        if self._phase in (_LINGERING, _CLOSED):
            return
        if self._exchange is not None:
            self._phase = _LINGERING
            self._set_timer()
            self._update_reading()
            self._exchange.fail(error)
            return
        path = self._url.partition(b"?")[0].decode("latin-1")
        request_id = secrets.token_hex(16)
        body = error_body(error, path, request_id)
        headers = MutableHeaders(error.headers | {"content-type": "application/json"})
        headers |= {"content-length": str(len(body)), "x-request-id": request_id}
        headers["connection"] = "close"
        if is_anthropic(path):
            headers["request-id"] = request_id
        status = error_status(error, path)
        head = response_head(status, [*self.default_headers(), *headers.raw])
        self.write(head + body)
        seconds = self._loop.time() - self._began_at
        log_request(request_id, "-", path, status, seconds, len(body), None)
        self._linger()

    def _is_full(self) -> APIError:
        message = f"the server has {self.pool.limit} connections, its maximum"
        return APIError(503, message, headers=_RETRY)

    # ---- deadlines and the end

    def _receive_seconds(self) -> float:
        seconds = self.settings.body_timeout
        return min(seconds, _SURPLUS_SECONDS) if self._is_surplus else seconds

    def _set_timer(self, seconds: float = 0.0, callback: Callable[[], None] | None = None) -> None:
        """Replace the connection's timer; without a callback, there is none."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if callback is not None:
            self._timer = self._loop.call_later(seconds, callback)

    def _end_slow_request(self) -> None:
        self._is_late = True  # such a client is not waited for any longer
        if self._is_surplus:
            self._refuse(self._is_full())
        else:
            seconds = self.settings.body_timeout
            self._refuse(APIError(408, f"a request must arrive within {seconds} s"))

    def _end_slow_reader(self) -> None:
        seconds = self.settings.send_timeout
        _log.info("a client did not read for %s s: dropped", seconds)
        self.abort()  # close() would wait for the reader

    def _linger(self) -> None:
        """Discard what still arrives, so that the client can read the answer; then close."""
        if self._is_late:
            self._close()
            return
        self._phase = _LINGERING
        self._held.clear()
        self._update_reading()
        self.pool.wait(self)
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._set_timer(_LINGER_SECONDS, self._close)

    def _close(self) -> None:
        """Close once everything is sent; not later than `send_timeout`."""
        self._phase = _CLOSED
        self.pool.wait(self)
        self._transport.close()
        self._set_timer(self.settings.send_timeout, self._transport.abort)

    def _update_reading(self) -> None:
        """Pause reading while the application does not take the body that has arrived."""
        exchange = self._exchange
        is_full = exchange is not None and exchange.num_buffered > _MAX_BUFFERED
        is_paused = is_full and self._phase == _RECEIVING
        if is_paused != self._is_reading_paused and not self._transport.is_closing():
            self._is_reading_paused = is_paused
            if is_paused:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()


def _body_length(headers: list[tuple[bytes, bytes]], version: str) -> int | None:
    """Return the declared length of a body; None if it is chunked.

    Raises
    ------
    APIError
        501, if the body is encoded in another way; 400, if HTTP/1.0 encodes it.
    """
    found = b",".join(value for name, value in headers if name == b"transfer-encoding")
    if found:
        codings = [coding.strip().lower() for coding in found.split(b",")]
        if codings != [b"chunked"]:
            names = b", ".join(codings)[:80].decode("latin-1")
            raise APIError(501, f"Transfer-Encoding must be chunked; got {names!r}")
        if version == "1.0":
            raise APIError(400, "HTTP/1.0 has no Transfer-Encoding; got chunked")
        return None
    return next((int(value) for name, value in headers if name == b"content-length"), 0)


def _address(given: Any) -> tuple[str, int] | None:
    """Return host and port of a socket's address; None for a Unix socket."""
    return (str(given[0]), int(given[1])) if isinstance(given, tuple) else None


def _send_at_once(sock: Any) -> None:
    """Disable Nagle's algorithm, which would delay a frame until the previous one is acknowledged.

    asyncio does this only for sockets created with an explicit protocol number.
    """
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def http_protocol(
    config: ServerConfig, pool: ConnectionPool | None = None
) -> type[asyncio.Protocol]:
    """Return the protocol class for uvicorn's ``http`` option, with the limits of `config`.

    `pool` is by default one of `max_connections`.
    """
    namespace = {
        "settings": config,
        "pool": pool or ConnectionPool(config.max_connections),
        "_rounds": _Rounds(),
    }
    return type("HttpConnection", (_HttpConnection,), namespace)
