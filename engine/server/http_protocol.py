"""uvicorn's HTTP protocol with timeouts for clients that send or read too slowly."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from engine.server.protocol.errors import APIError, error_body
from engine.server.server_config import ServerConfig

__all__ = ["http_protocol"]

_REASONS = {408: "Request Timeout", 431: "Request Header Fields Too Large"}


class _BoundedProtocol(HttpToolsProtocol):
    """Closes connections with slow or oversized headers, and clients that do not read.

    uvicorn itself has no such limits: a connection without a complete request never times out, and
    a response waits forever for a client that does not read.
    """

    server_config: ServerConfig  # set by `http_protocol`

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_in_headers = True
        self._num_header_bytes = 0
        self._has_ended = False  # whether a request ended in the last received data
        self._header_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        _send_at_once(transport.get_extra_info("socket"))
        self._start_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        _cancel(self._header_timer)
        self._header_timer = None
        _cancel(self._send_timer)
        self._send_timer = None
        super().connection_lost(exc)

    # ---- headers

    def data_received(self, data: bytes) -> None:
        """Parse received data; reject headers beyond the size limit."""
        limit = self.server_config.max_header_bytes
        while data and not self.transport.is_closing():
            size = limit - self._num_header_bytes if self._is_in_headers else len(data)
            if not size:
                self._refuse(431, f"the headers must have at most {limit} bytes")
                return
            part = data[:size]
            data = data[size:]
            self._has_ended = False
            super().data_received(part)
            if self._is_in_headers and not self._has_ended:
                self._num_header_bytes += len(part)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_headers = True
        self._num_header_bytes = 0
        self._start_header_timer()

    def on_headers_complete(self) -> None:
        self._is_in_headers = False
        _cancel(self._header_timer)
        self._header_timer = None
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._is_in_headers = True
        self._num_header_bytes = 0
        self._has_ended = True

    def _start_header_timer(self) -> None:
        if self._header_timer is None:
            seconds = self.server_config.body_timeout
            self._header_timer = self.loop.call_later(seconds, self._end_slow_headers)

    def _end_slow_headers(self) -> None:
        self._header_timer = None
        if not self.transport.is_closing():
            seconds = self.server_config.body_timeout
            self._refuse(408, f"a request must arrive within {seconds} s")

    def _refuse(self, status: int, message: str) -> None:
        body = error_body(APIError(status, message))
        head = (
            f"HTTP/1.1 {status} {_REASONS[status]}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(head.encode("ascii") + body)
        self.transport.close()

    # ---- slow readers

    def pause_writing(self) -> None:
        super().pause_writing()
        seconds = self.server_config.send_timeout
        self._send_timer = self.loop.call_later(seconds, self._end_slow_reader)

    def resume_writing(self) -> None:
        _cancel(self._send_timer)
        self._send_timer = None
        super().resume_writing()

    def _end_slow_reader(self) -> None:
        self._send_timer = None
        self.logger.info("a client did not read for %s s: dropped", self.server_config.send_timeout)
        self.transport.abort()  # close() would wait for the reader


def _send_at_once(sock: Any) -> None:
    """Disable Nagle's algorithm, which would delay a frame until the previous one is acknowledged.

    asyncio does this only for sockets created with an explicit protocol number.
    """
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def http_protocol(config: ServerConfig) -> type[asyncio.Protocol]:
    """Return the protocol class for uvicorn's ``http`` option, with the limits of `config`.

    `body_timeout` applies to the headers here, and to the body in `limits.read_body`.
    """
    made = type("BoundedProtocol", (_BoundedProtocol,), {"server_config": config})
    return cast("type[asyncio.Protocol]", made)
