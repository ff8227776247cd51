"""`Peer`: a connection with a receiver thread, and the state of the process at the other end."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Collection

from engine.distributed.connection import Connection, Message
from engine.distributed.messages import from_text
from engine.errors import RankError

__all__ = ["FAIL", "PING", "PING_SECONDS", "Peer"]

# Message kinds that a `Peer` handles itself: the process's current operation, and its last words.
# The processes number their own kinds from 2 on.
PING, FAIL = range(2)
PING_SECONDS = 0.5


class Peer:
    """The process at the other end of a connection. A thread receives its messages.

    Parameters
    ----------
    connection : Connection
    name : str
        Name in errors, such as "stage 1".
    apart : collection of int
        Kinds of messages that another thread waits for; see `next`.

    Attributes
    ----------
    doing : str
        Operation that it last reported.
    words : str
        Its last words; "" if it has not failed.
    lost : str
        Reason why the connection ended; "" while it is open.
    heard, lost_since : float
        Times of its last message and of the connection's end, on the monotonic clock.
    """

    def __init__(self, connection: Connection, name: str, apart: Collection[int] = ()) -> None:
        self.connection = connection
        self.name = name
        self.doing = "starting"
        self.words = ""
        self.lost = ""
        self.heard = time.monotonic()
        self.lost_since = 0.0
        self._messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._apart: dict[int, queue.SimpleQueue[Message | None]]
        self._apart = {kind: queue.SimpleQueue() for kind in apart}
        threading.Thread(target=self._listen, daemon=True).start()

    @property
    def has_message(self) -> bool:
        """Whether `next` would return a message, or raise, at once."""
        return not self._messages.empty()

    def next(self, timeout: float, kind: int | None = None) -> Message | None:
        """Return the next message; None if none arrives within `timeout` seconds.

        `kind`: one of those kept apart; None: any other.

        Raises
        ------
        RankError
            If the connection has ended and all messages were returned.
        """
        messages = self._messages if kind is None else self._apart[kind]
        try:
            message = messages.get(timeout=timeout)
        except queue.Empty:
            return None
        if message is None:
            messages.put(None)  # the next call finds the end, too
            raise RankError(self.words or f"the connection to {self.name} was lost: {self.lost}")
        return message

    def _listen(self) -> None:
        try:
            while True:
                message = self.connection.receive()
                self.heard = time.monotonic()
                kind, _, arrays = message
                if kind == PING:
                    self.doing = from_text(arrays[0])
                elif kind == FAIL:
                    self.words = from_text(arrays[0])
                else:
                    self._apart.get(kind, self._messages).put(message)
        except Exception as error:  # after any error, no more messages can be read
            self.lost_since = time.monotonic()
            self.lost = str(error) or type(error).__name__
        for messages in (self._messages, *self._apart.values()):
            messages.put(None)
