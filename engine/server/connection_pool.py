"""`ConnectionPool`: the connections of an API process, and which of them makes room for a new one.

Each connection takes a file descriptor and memory, so their number is limited. A client that has
not sent a complete request holds nothing worth keeping: when the limit is reached, the one that has
kept the server waiting longest makes room. Only if every connection is being answered (or has been
waiting for less than a second) is a new one surplus. A surplus connection is served if it asks for
a path in `ALWAYS_SERVED`, or if another one has ended by then; otherwise it is answered with 503.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import Protocol

__all__ = ["ALWAYS_SERVED", "RESERVE", "ConnectionPool", "fitting_pool"]

ALWAYS_SERVED = frozenset({"/health"})
"""Paths that need neither a key nor room: monitoring must work when the server is full."""

RESERVE = 4608
"""Maximum surplus connections; more than `listeners.BACKLOG`, which is accepted at once."""

_OTHER_FILES = 256  # open files that are not connections: sockets to engines, pipes, libraries
_GRACE_SECONDS = 1.0  # a connection is not closed for another one sooner
_STALL_GRACE_SECONDS = 5.0  # the same for a client that reads its answer too slowly


class _Connection(Protocol):
    def make_room(self) -> None:
        """Answer that the server is full, if a request has begun, and close soon."""

    def abort(self) -> None:
        """Close at once."""


class ConnectionPool:
    """Limits the number of connections; see the module.

    Parameters
    ----------
    limit : int
        Maximum connections beside the surplus.
    reserve : int
        Maximum surplus connections; beyond it the oldest is closed without an answer.
    clock : callable, optional
        Returns seconds.

    Examples
    --------
    >>> pool = ConnectionPool(1, reserve=1)
    >>> class Client:
    ...     def abort(self):
    ...         print("closed")
    >>> first, second, third = Client(), Client(), Client()
    >>> pool.enter(first), pool.enter(second)
    (True, False)
    >>> pool.enter(third)  # the surplus is limited, too
    closed
    False
    >>> pool.leave(first)
    >>> pool.promote(third)
    True
    """

    def __init__(
        self, limit: int, *, reserve: int = RESERVE, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limit = limit
        self._reserve = reserve
        self._clock = clock
        self._members: set[_Connection] = set()
        self._surplus: dict[_Connection, None] = {}  # oldest first
        # Since when each client has kept the server waiting, longest first: for a request, or for
        # room in the buffer of an answer.
        self._waiting: dict[_Connection, float] = {}
        self._stalled: dict[_Connection, float] = {}

    def __len__(self) -> int:
        return len(self._members) + len(self._surplus)

    def enter(self, connection: _Connection) -> bool:
        """Add a new connection; return False if it is surplus."""
        if len(self._members) < self.limit or self._close_one():
            self._members.add(connection)
            return True
        self._add_surplus(connection)
        return False

    def leave(self, connection: _Connection) -> None:
        """Remove a connection that has ended."""
        self._members.discard(connection)
        self._surplus.pop(connection, None)
        self.serve(connection)
        self.resume(connection)

    def promote(self, connection: _Connection) -> bool:
        """Give a surplus connection the place of one that has ended; return whether there is one.

        A connection that was aborted meanwhile gets none.
        """
        if len(self._members) >= self.limit or connection not in self._surplus:
            return False
        del self._surplus[connection]
        self._members.add(connection)
        self.wait(connection)
        return True

    def wait(self, connection: _Connection) -> None:
        """Note that the server waits for this client from now on: for a request, or its end."""
        if connection in self._members:
            self._waiting.pop(connection, None)
            self._waiting[connection] = self._clock()

    def stall(self, connection: _Connection) -> None:
        """Note that the server waits for this client to read from now on."""
        if connection in self._members:
            self._stalled[connection] = self._clock()

    def resume(self, connection: _Connection) -> None:
        """Note that this client has read enough."""
        self._stalled.pop(connection, None)

    def serve(self, connection: _Connection) -> None:
        """Note that this client's request has arrived."""
        self._waiting.pop(connection, None)

    def _close_one(self) -> bool:
        """Close the connection that has waited longest; return False if none has long enough."""
        now = self._clock()
        for group, grace in (
            (self._waiting, _GRACE_SECONDS),
            (self._stalled, _STALL_GRACE_SECONDS),
        ):
            connection, since = next(iter(group.items()), (None, now))
            if connection is not None and now - since >= grace:
                self.leave(connection)
                self._add_surplus(connection)
                connection.make_room()
                return True
        return False

    def _add_surplus(self, connection: _Connection) -> None:
        if len(self._surplus) >= self._reserve:
            oldest = next(iter(self._surplus))
            self.leave(oldest)
            oldest.abort()
        self._surplus[connection] = None


def fitting_pool(limit: int) -> ConnectionPool:
    """Return a pool for `limit` connections, or for as many as this process may have open files.

    Each connection is an open file. The process's limit on them is raised as far as needed; without
    privileges it cannot be raised beyond the hard limit (`ulimit -Hn`).
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limit + RESERVE + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return ConnectionPool(limit)
    reserve = min(RESERVE, soft // 4)
    return ConnectionPool(max(1, soft - reserve - _OTHER_FILES), reserve=reserve)
