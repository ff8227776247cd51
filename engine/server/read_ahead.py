"""`ReadAhead`: reads an async generator, with a non-blocking poll for items that are ready."""

from __future__ import annotations

import asyncio
import contextlib
import types
from collections.abc import AsyncGenerator, Generator
from typing import Any, Generic, TypeVar

__all__ = ["ReadAhead"]

T = TypeVar("T")


class ReadAhead(Generic[T]):
    """Reads an async generator from one task; accumulated items can be taken together.

    `poll` itself starts the generator's next step. If the step has to wait, the next call of `next`
    resumes it, so no extra task or queue is needed.

    Parameters
    ----------
    source : async generator
        Its items must not be None.
    """

    def __init__(self, source: AsyncGenerator[T, None]) -> None:
        self._source = source
        self._step: Any = None  # step in progress, waiting for `_future`
        self._future: Any = None
        self._error: BaseException | None = None  # raised during `poll`; `next` re-raises it

    async def next(self) -> T | None:
        """Wait for the next item; None at the end.

        Raises
        ------
        BaseException
            Whatever the generator raises.
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
        """Return the next item if it is ready; otherwise, or at the end, None."""
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
        """Close the generator, even if a step is waiting."""
        step = self._step
        self._step = None
        if step is not None:
            with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration):
                await _resume(step, self._future, asyncio.CancelledError())
        await self._source.aclose()


@types.coroutine
def _resume(step: Any, future: Any, error: BaseException | None = None) -> Generator[Any, Any, Any]:
    """Resume a step that waits for `future`, or throw `error` into it."""
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
