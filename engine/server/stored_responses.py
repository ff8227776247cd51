"""`ResponseStore`: the responses of /v1/responses that clients can ask for again, in memory.

Each API key has a space of its own: to other keys its responses do not exist. A response holds the
*turn* that it ended: the items of its input and output. Turns link to the ones before them, so that
a conversation of many responses is stored once, and the items of a response that was dropped or
deleted stay readable to those that continue from it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import msgspec

from engine.server.event_log import EventLog
from engine.server.protocol.errors import APIError
from engine.server.server_config import ServerConfig

__all__ = ["ResponseStore", "StoredResponse", "Turn", "encoded", "joined"]

_OVERHEAD = 1024  # bytes counted for a response or a turn beside its content
_UNFINISHED = ("queued", "in_progress")

_encode = msgspec.json.Encoder().encode


def encoded(items: list[Any]) -> bytes:
    """Return items as JSON, without the brackets of their list."""
    return _encode(items)[1:-1]


def joined(parts: Iterable[bytes]) -> bytes:
    """Return encoded items one after the other.

    Examples
    --------
    >>> joined([encoded([1, 2]), encoded([]), encoded([3])])
    b'1,2,3'
    """
    return b",".join(part for part in parts if part)


class Turn:
    """Items of one response's input and output.

    Parameters
    ----------
    data : bytes
        Input items, then output items, as `encoded` returns them.
    previous : Turn or None
        The turn before, of `previous_response_id`.

    Attributes
    ----------
    data, previous
    num_owners : int
        Responses and later turns that refer to it.
    """

    __slots__ = ("data", "num_owners", "previous")

    def __init__(self, data: bytes, previous: Turn | None) -> None:
        self.data = data
        self.previous = previous
        self.num_owners = 0

    def joined(self, limit: int) -> bytes | None:
        """Return all items up to this turn as a JSON list; None if it exceeds `limit` bytes."""
        parts: list[bytes] = []
        size = 2
        turn: Turn | None = self
        while turn is not None:
            parts.append(turn.data)
            size += len(turn.data) + 1
            if size > limit:
                return None
            turn = turn.previous
        return b"[" + joined(reversed(parts)) + b"]"


class StoredResponse:
    """One stored response.

    Attributes
    ----------
    id, status : str
    body : bytes
        The response object as JSON.
    item_ids : tuple of str
        Ids of the items of its output, in order.
    turn : Turn or None
        Its items: input only until it has finished; another response may continue from it then.
    job : asyncio.Task or None
        For a background response, the task that computes it.
    log : EventLog or None
        Events of a background response that is streamed.
    """

    __slots__ = ("body", "id", "item_ids", "job", "log", "status", "turn")

    def __init__(self, response: dict[str, Any]) -> None:
        self.id: str = response["id"]
        self.turn: Turn | None = None
        self.job: asyncio.Task[None] | None = None
        self.log: EventLog | None = None
        self.update(response)

    def update(self, response: dict[str, Any]) -> None:
        """Store the response's current state."""
        self.status: str = response["status"]
        self.body = _encode(response)
        self.item_ids = tuple(item["id"] for item in response.get("output", ()))

    @property
    def num_bytes(self) -> int:
        """Bytes counted for the response, without its turn."""
        return len(self.body) + _OVERHEAD + self.num_event_bytes

    @property
    def num_event_bytes(self) -> int:
        """Bytes of its events."""
        return 0 if self.log is None else self.log.num_bytes

    @property
    def is_finished(self) -> bool:
        """Whether the response is final."""
        return self.status not in _UNFINISHED


class _Space:
    """The responses of one key."""

    def __init__(self) -> None:
        self.finished: dict[str, StoredResponse] = {}  # oldest first
        self.running: dict[str, StoredResponse] = {}
        self.owners: dict[str, StoredResponse] = {}  # item id -> the finished response with it
        self.num_bytes = 0  # bytes of the finished responses and their turns, and of all events

    @property
    def is_used(self) -> bool:
        return bool(self.finished or self.running)

    def find(self, response_id: str) -> StoredResponse | None:
        return self.finished.get(response_id) or self.running.get(response_id)

    def add(self, stored: StoredResponse, turn: Turn) -> None:
        """Add a finished response."""
        stored.turn = turn
        if self.running.pop(stored.id, None) is not None:
            self.num_bytes -= stored.num_event_bytes
        self.finished[stored.id] = stored
        self.owners |= dict.fromkeys(stored.item_ids, stored)
        self.num_bytes += stored.num_bytes
        owned: Turn | None = turn
        while owned is not None:
            owned.num_owners += 1
            if owned.num_owners > 1:
                return
            self.num_bytes += len(owned.data) + _OVERHEAD
            owned = owned.previous

    def shrink(self, stored: StoredResponse, num_bytes: int) -> None:
        """Keep at most `num_bytes` of a response's events."""
        assert stored.log is not None
        self.num_bytes -= stored.log.num_bytes
        stored.log.shrink(num_bytes)
        self.num_bytes += stored.log.num_bytes

    def drop(self, response_id: str) -> None:
        """Drop a finished response, and the turns that no other one needs."""
        stored = self.finished.pop(response_id)
        self.num_bytes -= stored.num_bytes
        for name in stored.item_ids:
            self.owners.pop(name, None)
        owned = stored.turn
        while owned is not None:
            owned.num_owners -= 1
            if owned.num_owners:
                return
            self.num_bytes -= len(owned.data) + _OVERHEAD
            owned = owned.previous


class ResponseStore:
    """The stored responses of all keys of one API process.

    Each key keeps its last `max_stored_responses`. Beyond `max_stored_bytes` in all, the oldest
    response of the key with the most bytes is dropped, its events first. Of responses in progress
    only the events are counted, and the oldest are dropped if nothing else can be: the rest is a
    request, and limited as such.

    Parameters
    ----------
    config : ServerConfig

    Attributes
    ----------
    is_enabled : bool
        Whether anything is stored.

    Examples
    --------
    >>> store = ResponseStore(ServerConfig(max_stored_responses=1))
    >>> for name in "ab":
    ...     store.put("key", StoredResponse({"id": name, "status": "completed"}), Turn(b"", None))
    >>> [store.find("key", name) is not None for name in "ab"], store.find("other", "b")
    ([False, True], None)
    """

    def __init__(self, config: ServerConfig) -> None:
        self._most = config.num_stored_responses
        self._most_bytes = config.max_stored_bytes
        self._spaces: dict[str | None, _Space] = {}
        self.is_enabled = self._most > 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all finished responses and their turns, and of all events."""
        return sum(space.num_bytes for space in self._spaces.values())

    def find(self, key: str | None, response_id: str) -> StoredResponse | None:
        """Return a key's response, or None."""
        space = self._spaces.get(key)
        return None if space is None else space.find(response_id)

    def owner(self, key: str | None, item_id: str) -> StoredResponse | None:
        """Return the finished response of a key whose output has an item, or None."""
        space = self._spaces.get(key)
        return None if space is None else space.owners.get(item_id)

    def begin(self, key: str | None, stored: StoredResponse) -> None:
        """Store a response that is computed in the background; `put` must follow.

        Raises
        ------
        APIError
            429, if as many of the key as can be stored are in progress.
        """
        space = self._spaces.setdefault(key, _Space())
        if len(space.running) >= self._most:
            message = f"{self._most} responses are in progress, the maximum (max_stored_responses)"
            raise APIError(429, message, headers={"Retry-After": "5"})
        space.running[stored.id] = stored

    def put(self, key: str | None, stored: StoredResponse, turn: Turn) -> None:
        """Store a finished response, which ended `turn`."""
        space = self._spaces.setdefault(key, _Space())
        space.add(stored, turn)
        while len(space.finished) > self._most:
            space.drop(next(iter(space.finished)))
        self._fit()
        self._spaces = {name: each for name, each in self._spaces.items() if each.is_used}

    def log(self, key: str | None, stored: StoredResponse, frames: bytes) -> None:
        """Add events to a response with a log, also after it has finished."""
        assert stored.log is not None
        before = stored.log.num_bytes
        stored.log.extend(frames)
        space = self._spaces.get(key)
        if space is None or space.find(stored.id) is not stored:
            return  # deleted, or dropped; its readers still follow it
        space.num_bytes += stored.log.num_bytes - before
        if excess := self._fit():
            space.shrink(stored, stored.log.num_bytes - excess)

    def _fit(self) -> int:
        """Drop finished responses, their events first; return the bytes still beyond the limit."""
        while (excess := self.num_bytes - self._most_bytes) > 0:
            spaces = [each for each in self._spaces.values() if each.finished]
            if not spaces:
                return excess
            largest = max(spaces, key=lambda each: each.num_bytes)
            oldest = next(iter(largest.finished.values()))
            if oldest.num_event_bytes:
                largest.shrink(oldest, 0)
            else:
                largest.drop(oldest.id)
        return 0

    def delete(self, key: str | None, response_id: str) -> None:
        """Forget a finished response of a key; an unknown id is ignored."""
        space = self._spaces.get(key)
        if space is not None and response_id in space.finished:
            space.drop(response_id)
            if not space.is_used:
                del self._spaces[key]
