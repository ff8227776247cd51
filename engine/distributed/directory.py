"""`Directory`: the addresses of all replicas, for clients on any machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["REGISTER_SECONDS", "Directory"]

REGISTER_SECONDS = 3.0  # interval at which replicas re-register, in case the directory restarts
_EXPIRY_SECONDS = 5 * REGISTER_SECONDS


@dataclass(slots=True)
class _Entry:
    number: int
    address: str
    seen: float


class Directory:
    """Assigns numbers to replicas, and drops those that have not registered for 15 seconds.

    Clients notice a dead replica earlier: their connections end.

    Parameters
    ----------
    clock : callable, optional
        Returns the time in seconds.

    Examples
    --------
    >>> directory = Directory()
    >>> directory.register("a", "tcp://10.0.0.1:7000"), directory.register("b", "tcp://10.0.0.2:7000")
    (0, 1)
    >>> directory.leave("a")
    >>> directory.replicas()
    {1: 'tcp://10.0.0.2:7000'}
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._next_number = 0
        self.last_use = clock()

    def register(self, name: str, address: str, number: int | None = None) -> int:
        """Record a replica's address, and return its number, which stays the same.

        `number`: its previous number, in case the directory has restarted.
        """
        now = self.last_use = self._clock()
        entry = self._entries.get(name)
        if entry is None:
            if number is None or any(each.number == number for each in self._entries.values()):
                number = self._next_number
            entry = self._entries[name] = _Entry(number, address, now)
            self._next_number = max(self._next_number, number + 1)
        entry.address = address
        entry.seen = now
        return entry.number

    def leave(self, name: str) -> None:
        """Remove a replica that no longer accepts requests."""
        self._entries.pop(name, None)

    def replicas(self) -> dict[int, str]:
        """Return the address of each replica, by its number."""
        now = self.last_use = self._clock()
        overdue = [n for n, e in self._entries.items() if now - e.seen > _EXPIRY_SECONDS]
        for name in overdue:
            del self._entries[name]
        return {entry.number: entry.address for entry in self._entries.values()}
