"""`SharedEngine`: an `LLMEngine` shared by several callers, with an inbox per request."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import Any, Generic, Protocol, TypeVar

from engine.core.locks import EngineLock
from engine.errors import RequestError
from engine.llm_engine import LLMEngine
from engine.outputs import RequestOutput
from engine.snapshot import StepClock

__all__ = ["Inbox", "SharedEngine"]


class Inbox(Protocol):
    """Receives a request's outputs; a list, for example."""

    def append(self, output: RequestOutput, /) -> Any:
        """Add an output."""


InboxT = TypeVar("InboxT", bound=Inbox)


class SharedEngine(Generic[InboxT]):
    """An engine, the lock its callers share, and an inbox per request.

    Parameters
    ----------
    engine : LLMEngine

    Attributes
    ----------
    engine : LLMEngine
    lock : EngineLock
        Held by whichever caller is using the engine.
    inbox : dict of str to Inbox
        Request id -> receiver of its outputs. Requests of one call may share a list, so that a
        step's cost grows with the outputs that arrived, not with the number of waiting requests.
        Outputs of a request without an inbox are dropped.
    clock : StepClock
        Times the steps.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self.lock = EngineLock()
        self.clock = StepClock()
        self.inbox: dict[str, InboxT] = {}
        self._unwanted: deque[str] = deque()  # requests to abort

    def step(self) -> None:
        """Compute one step and deliver its outputs to the inboxes; the caller holds the lock.

        Raises
        ------
        RequestError
            If the engine was closed.
        """
        if self.engine.kv_cache.is_closed:
            raise RequestError("the engine was closed before the request finished")
        self.abort_dropped()
        start = time.perf_counter()
        outputs = self.engine.step()
        self.clock.note(time.perf_counter() - start)
        for output in outputs:
            inbox = self.inbox.get(output.request_id)
            if inbox is not None:
                inbox.append(output)

    def drop(self, request_ids: Iterable[str]) -> None:
        """Abort these requests and discard their last outputs; callable from any thread, anytime.

        If the lock is held (the garbage collector may close an iterator in the middle of a step),
        they are aborted before the next step instead.
        """
        self._unwanted.extend(request_ids)
        if self.lock.acquire(blocking=False):
            try:
                self.abort_dropped()
            finally:
                self.lock.release()

    def abort_dropped(self) -> None:
        """Abort the requests dropped since the last call; the caller holds the lock."""
        while self._unwanted:
            ids = [self._unwanted.popleft()]
            self.engine.abort_request(ids)
            self.engine.forget_aborted(ids)

    @property
    def is_idle(self) -> bool:
        """Tell whether a step would have nothing to do."""
        return not (self._unwanted or self.engine.has_unfinished_requests())

    def close(self) -> None:
        """Free the memory of the engine and the model."""
        with self.lock:
            self.engine.close()
            self.engine.model.close()
