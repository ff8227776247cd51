"""`ReadAhead`: an async generator whose reader can ask, without waiting, for what is there."""

from __future__ import annotations

import asyncio
import contextlib
import types
from collections.abc import AsyncGenerator, Generator
from typing import Any, Generic, TypeVar

__all__ = ["ReadAhead"]

T = TypeVar("T")


class ReadAhead(Generic[T]):
    """Reads an async generator in one task; items that have piled up are taken together.

    `poll` starts the next step of the generator itself. If that has to wait, `next` later goes on
    waiting in its place: no further task and no queue are needed.

    Parameters
    ----------
    source : async generator
        Its items are not None.
    """

    def __init__(self, source: AsyncGenerator[T, None]) -> None:
        self._source = source
        self._step: Any = None  # started, and waits for
        self._future: Any = None
        self._error: BaseException | None = None  # found by `poll`

    async def next(self) -> T | None:
        """Return the next item; None at the end.

        Raises
        ------
        BaseException
            What the generator raises.
        """
        if self._error is not None:
            error = self._error
            self._error = None
            raise error
        if self._step is None:
            return await anext(self._source, None)
        step = self._step
        self._step = None
        try:
            item: T = await _resume(step, self._future)
        except StopAsyncIteration:
            return None
        return item

    def poll(self) -> T | None:
        """Return the next item if it is there already; None if not, and at the end."""
        if self._step is not None or self._error is not None:
            return None
        step = self._source.__anext__().__await__()
        try:
            self._future = step.send(None)
        except StopIteration as found:
            item: T = found.value
            return item
        except StopAsyncIteration:
            return None
        except BaseException as error:
            self._error = error
            return None
        self._step = step
        return None

    async def close(self) -> None:
        """Close the generator, wherever it is."""
        step = self._step
        self._step = None
        if step is not None:
            with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration):
                await _resume(step, self._future, asyncio.CancelledError())
        await self._source.aclose()


@types.coroutine
def _resume(step: Any, future: Any, error: BaseException | None = None) -> Generator[Any, Any, Any]:
    """Go on with a step that waits for `future`, or that is to end with `error`."""
    while True:
        try:
            if error is None:
                yield future
        except BaseException as raised:
            error = raised
        try:
            future = step.send(None) if error is None else step.throw(error)
        except StopIteration as found:
            return found.value
        error = None
