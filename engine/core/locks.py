"""Guards against concurrent use: `EngineLock` for `LLM`, `not_reentrant` for `LLMEngine`."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from engine.errors import RequestError

__all__ = ["EngineLock", "not_reentrant"]

P = ParamSpec("P")
R = TypeVar("R")


class _HasEntry(Protocol):
    _entry: Any  # threading.Lock, held while a guarded method runs


S = TypeVar("S", bound=_HasEntry)


def not_reentrant(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Make `method` raise while another guarded method of the same object is running.

    It raises instead of waiting: the object belongs to one thread at a time, and code that runs
    inside its steps (a logits processor) must not call it.
    """

    @functools.wraps(method)
    def guarded(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        entry = self._entry
        if not entry.acquire(False):
            owner = type(self).__name__
            raise RequestError(
                f"{owner}.{method.__name__} was called while another call of the same {owner} is "
                f"running: it belongs to one thread at a time, and a logits processor cannot use "
                "it; several threads can share an LLM"
            )
        try:
            return method(self, *args, **kwargs)
        finally:
            entry.release()

    return guarded


class EngineLock:
    """A lock that raises, instead of deadlocking, when its holder acquires it again.

    Examples
    --------
    >>> lock = EngineLock()
    >>> with lock:
    ...     lock.acquire(blocking=False)
    False
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: int | None = None

    def acquire(self, blocking: bool = True) -> bool:
        """Acquire the lock, as `threading.Lock.acquire` does.

        Raises
        ------
        RequestError
            If this thread already holds the lock, so it would wait for itself.
        """
        # Only this thread ever stores its own id, so the comparison needs no lock.
        if blocking and self._holder == threading.get_ident():
            raise RequestError(
                "the LLM was called from within one of its own calls: a logits processor or an "
                "iterable of prompts cannot use the LLM that reads it"
            )
        if not self._lock.acquire(blocking):
            return False
        self._holder = threading.get_ident()
        return True

    def release(self) -> None:
        """Release the lock."""
        self._holder = None
        self._lock.release()

    def __enter__(self) -> EngineLock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
