"""`/v1/engine/watch`: engine snapshots as server-sent events, for the web page."""

from __future__ import annotations

import asyncio
import time
from typing import Any, NamedTuple

import msgspec
from starlette.datastructures import State
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from engine.async_engine import EngineClient
from engine.server.sse import until_disconnected

__all__ = ["INTERVAL", "SnapshotFeed", "routes"]

INTERVAL = 0.25  # seconds between snapshots


class _Frame(NamedTuple):
    data: bytes
    is_last: bool


class SnapshotFeed:
    """Takes snapshots while anyone watches, and sends each to all viewers.

    A viewer slower than the feed skips snapshots; nothing is queued.

    Parameters
    ----------
    client : EngineClient
    salt_prefix : str or None
        See `EngineClient.snapshot`.
    """

    def __init__(self, client: EngineClient, salt_prefix: str | None = None) -> None:
        self._client = client
        self._salt_prefix = salt_prefix
        self._num_viewers = 0
        self._task: asyncio.Task[None] | None = None
        self._next: asyncio.Future[_Frame] | None = None

    @property
    def num_viewers(self) -> int:
        """Current number of viewers."""
        return self._num_viewers

    def join(self) -> None:
        """Add a viewer; the first starts the snapshots."""
        self._num_viewers += 1
        if self._task is None or self._task.done():
            if self._next is not None and self._next.done():  # last frame of the previous run
                self._next = None
            self._task = asyncio.create_task(self._run())

    def leave(self) -> None:
        """Remove a viewer; the last stops the snapshots."""
        self._num_viewers -= 1
        if self._num_viewers == 0 and self._task is not None:
            self._task.cancel()
            self._task = None

    def next_frame(self) -> asyncio.Future[_Frame]:
        """Return a future of the next snapshot, shared by all viewers."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        return self._next

    async def _run(self) -> None:
        while True:
            started = time.monotonic()
            frame = await self._take()
            arrived = self.next_frame()
            arrived.set_result(frame)
            if frame.is_last:
                return  # keep the last frame for viewers that were busy
            self._next = None
            await asyncio.sleep(max(0.0, started + INTERVAL - time.monotonic()))

    async def _take(self) -> _Frame:
        try:
            snapshot = await self._client.snapshot(self._salt_prefix)
        except Exception as error:  # the engine has stopped: viewers receive the reason
            message = msgspec.json.encode({"message": str(error)})
            return _Frame(b"event: error\ndata: " + message + b"\n\n", True)
        return _Frame(b"data: " + msgspec.json.encode(snapshot) + b"\n\n", False)


class _WatchResponse(Response):
    """Sends a feed's frames until the viewer disconnects or the server shuts down."""

    def __init__(self, feed: SnapshotFeed, state: State) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(headers=headers, media_type="text/event-stream")
        del self.headers["content-length"]
        self._feed = feed
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._feed.join()
        gone = asyncio.create_task(until_disconnected(receive))
        try:
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
            await self._send_frames(send, gone)
        finally:
            gone.cancel()
            self._feed.leave()

    async def _send_frames(self, send: Send, gone: asyncio.Task[None]) -> None:
        is_last = False
        while not is_last:
            arriving = self._feed.next_frame()
            either: set[asyncio.Future[Any]] = {gone, arriving}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                return
            data, is_last = arriving.result()
            is_last = is_last or self._state.is_draining
            event = {"type": "http.response.body", "body": data, "more_body": not is_last}
            try:
                await asyncio.wait_for(send(event), self._state.config.send_timeout)
            except (asyncio.TimeoutError, OSError):
                return


async def _watch(request: Request) -> Response:
    state = request.app.state
    if state.is_draining:
        raise HTTPException(503, "the server is shutting down", {"Retry-After": "10"})
    if not hasattr(state, "snapshot_feeds"):
        state.snapshot_feeds = {}
    feeds: dict[str | None, SnapshotFeed] = state.snapshot_feeds
    salt = request.state.key_salt  # a key sees its own requests and prefixes
    for other in [other for other, feed in feeds.items() if not feed.num_viewers and other != salt]:
        del feeds[other]
    feed = feeds.setdefault(salt, SnapshotFeed(state.client, salt))
    most = state.config.max_watchers
    if sum(each.num_viewers for each in feeds.values()) >= most:
        message = f"max_watchers is {most}, and as many watch already"
        raise HTTPException(429, message, {"Retry-After": "5"})
    return _WatchResponse(feed, state)


def routes() -> list[Route]:
    return [Route("/v1/engine/watch", _watch, methods=["GET"])]
