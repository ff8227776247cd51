"""Server-sent events: writes frames as they arrive, and comments to keep idle streams alive."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.server.protocol.errors import APIError, api_error, error_body
from engine.server.read_ahead import ReadAhead

__all__ = [
    "DONE",
    "ClientGone",
    "EventStream",
    "all_or_none",
    "unless_disconnected",
    "until_disconnected",
]

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
_COMMENT = b": keep-alive\n\n"
_MAX_BATCH = 64  # maximum frames written together

_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # stops nginx from buffering frames
}


class ClientGone(Exception):
    """The client has disconnected: no response is needed."""


async def unless_disconnected(receive: Receive, work: Awaitable[T]) -> T:
    """Return the result of `work`; cancel it if the client disconnects.

    Raises
    ------
    ClientGone
        If the client disconnects first.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(until_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        await _cancel(task, watcher)


async def all_or_none(works: Iterable[Awaitable[T]]) -> list[T]:
    """Run coroutines concurrently; the first error cancels the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _cancel(*tasks)


async def until_disconnected(receive: Receive) -> None:
    """Return when the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


def openai_error_frame(error: APIError) -> bytes:
    """Return the frame for an error in a stream that has already started."""
    return b"data: " + error_body(error) + b"\n\n"


class EventStream(Response):
    """Response with server-sent events.

    An error before the first frame is raised, so that the response gets its status; a later error
    becomes a frame. Accumulated frames are written together.

    Parameters
    ----------
    frames : async generator of bytes
        Yields complete frames; closed when the client disconnects.
    keep_alive : float
        Seconds without a frame after which to send a comment; the first comment also sends the
        headers.
    error_frame : callable
        Converts an `APIError` to a frame.
    last : bytes
        Bytes written after the last frame or an error frame.
    """

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        *,
        keep_alive: float = 15.0,
        error_frame: Callable[[APIError], bytes] = openai_error_frame,
        last: bytes = DONE,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(_HEADERS)
        self._frames = frames
        self._interval = keep_alive
        self._error_frame = error_frame
        self._last = last
        self._is_started = False
        self._is_sending = False
        self._num_frames = 0  # frames sent up to the last tick
        self._num_sent = 0
        self._comment: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write the stream; return when it has ended or the client has disconnected."""
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._interval, self._tick, loop, send)
        self._timer = timer
        try:
            await unless_disconnected(receive, self._write(send))
        except ClientGone:
            if not self._is_started:
                raise
        except Exception as error:
            await self._finish_comment()
            if not self._is_started:
                raise
            found = self._error_frame(api_error(error)) + self._last
            await send({"type": "http.response.body", "body": found})
            if not isinstance(error, APIError) and api_error(error).status == 500:
                raise
        finally:
            self._timer.cancel()
            await self._finish_comment()

    async def _write(self, send: Send) -> None:
        reader = ReadAhead(self._frames)
        try:
            while (frame := await reader.next()) is not None:
                parts = [frame]
                while len(parts) < _MAX_BATCH and (more := reader.poll()) is not None:
                    parts.append(more)
                await self._send(send, b"".join(parts) if len(parts) > 1 else frame)
            await self._send(send, self._last, more_body=False)
        finally:
            await reader.close()

    async def _send(self, send: Send, data: bytes, *, more_body: bool = True) -> None:
        if self._comment is not None:
            await self._finish_comment()
        self._is_sending = True
        if not self._is_started:
            await self._start(send)
        self._num_sent += 1
        await send({"type": "http.response.body", "body": data, "more_body": more_body})
        self._is_sending = False

    async def _start(self, send: Send) -> None:
        self._is_started = True
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})

    # ---- comments

    def _tick(self, loop: asyncio.AbstractEventLoop, send: Send) -> None:
        is_idle = self._num_sent == self._num_frames and not self._is_sending
        self._num_frames = self._num_sent
        if is_idle and (self._comment is None or self._comment.done()):
            self._comment = loop.create_task(self._send_comment(send))
        self._timer = loop.call_later(self._interval, self._tick, loop, send)

    async def _send_comment(self, send: Send) -> None:
        if not self._is_started:
            await self._start(send)
        await send({"type": "http.response.body", "body": _COMMENT, "more_body": True})

    async def _finish_comment(self) -> None:
        task = self._comment
        self._comment = None
        if task is not None:
            with contextlib.suppress(Exception):
                await task
