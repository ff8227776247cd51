"""`EventLog`: events of a background stream, which readers follow from any of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from engine.server.protocol.errors import APIError

__all__ = ["EventLog"]

_FRAME_END = b"\n\n"
_FRAME_OVERHEAD = 64  # bytes counted for a frame beside its content
_MAX_AT_ONCE = 256  # frames that a reader takes together


class EventLog:
    """Frames of server-sent events in order; the number of a frame is its sequence number.

    Attributes
    ----------
    first : int
        Number of the oldest frame that is kept.
    num_bytes : int
        Bytes of the frames that are kept.
    is_closed : bool
        Whether no more frames follow.

    Examples
    --------
    >>> log = EventLog()
    >>> log.extend(b"data: 1\\n\\ndata: 2\\n\\n")
    >>> log.first, log.end
    (0, 2)
    """

    def __init__(self) -> None:
        self.first = 0
        self.num_bytes = 0
        self.is_closed = False
        self._frames: list[bytes] = []
        self._changed = asyncio.Event()

    @property
    def end(self) -> int:
        """Number of the next frame."""
        return self.first + len(self._frames)

    def extend(self, frames: bytes) -> None:
        """Add frames, each of which ends with an empty line."""
        for frame in frames.split(_FRAME_END)[:-1]:
            self._frames.append(frame + _FRAME_END)
            self.num_bytes += len(frame) + len(_FRAME_END) + _FRAME_OVERHEAD
        self._notify()

    def shrink(self, num_bytes: int) -> None:
        """Drop the oldest frames, so that at most `num_bytes` are kept."""
        count = 0
        while self.num_bytes > num_bytes and count < len(self._frames):
            self.num_bytes -= len(self._frames[count]) + _FRAME_OVERHEAD
            count += 1
        del self._frames[:count]
        self.first += count

    def close(self) -> None:
        """Let the readers end after the last frame."""
        self.is_closed = True
        self._notify()

    async def follow(self, after: int) -> AsyncGenerator[bytes, None]:
        """Yield the frames behind number `after`, and those to come, until the log is closed.

        Raises
        ------
        APIError
            If a frame is no longer kept.
        """
        at = after + 1
        while True:
            if at < self.first:
                message = f"events up to {self.first - 1} are no longer kept (max_stored_bytes)"
                raise APIError(400, f"{message}; got {at - 1}", param="starting_after")
            changed = self._changed
            begin = at - self.first
            if frames := self._frames[begin : begin + _MAX_AT_ONCE]:
                at += len(frames)
                yield b"".join(frames)
            elif self.is_closed:
                return
            else:
                await changed.wait()

    def _notify(self) -> None:
        """Wake the readers."""
        self._changed.set()
        self._changed = asyncio.Event()
