"""What the processes of a pipeline tell each other, and how each listens to another."""

from __future__ import annotations

import json
import queue
import threading
import time
from typing import Any

import numpy as np

from engine.distributed.connection import Connection, Message
from engine.errors import RankError

__all__ = ["PING_SECONDS", "Peer", "from_text", "to_text"]

# Kinds of messages. What a stage says first, to the engine and to the next stage:
HELLO, LINK = range(2)
# In both directions, twice a second: the sender lives, and this is what it is doing.
PING = 2
# From a stage to the engine; FAIL has its last words.
READY, ANSWER, FAIL = range(3, 6)
# From the engine to the stages; WELCOME says what to load.
WELCOME, PLAN, PREPARE, SHARE, STEP, EXPERTS = range(6, 12)
# From a stage to the next one.
ACTIVATIONS = 12

PING_SECONDS = 0.5


class Peer:
    """A process at the other end of a connection, which a thread listens to.

    Parameters
    ----------
    connection : Connection
    name : str
        "stage 1"; for errors.

    Attributes
    ----------
    doing : str
        What it was last known to do.
    words : str
        Its last words; "" if it has not failed.
    lost : str
        Why the connection has ended; "" if it has not.
    heard, lost_since : float
        When it was last heard of, and when the connection ended, on the monotonic clock.
    """

    def __init__(self, connection: Connection, name: str) -> None:
        self.connection = connection
        self.name = name
        self.doing = "starting"
        self.words = ""
        self.lost = ""
        self.heard = time.monotonic()
        self.lost_since = 0.0
        self._messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def next(self, timeout: float) -> Message | None:
        """Return the next message, after at most `timeout` seconds; None if there is none yet.

        Raises
        ------
        RankError
            If there are no more: the connection has ended.
        """
        try:
            message = self._messages.get(timeout=timeout)
        except queue.Empty:
            return None
        if message is None:
            self._messages.put(None)  # for the next call
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
                    self._messages.put(message)
        except Exception as error:  # whatever it is, nothing more can be read
            self.lost_since = time.monotonic()
            self.lost = str(error) or type(error).__name__
        self._messages.put(None)


def to_text(value: Any) -> Any:
    """Return a text, or a value that JSON has, as an array of uint8.

    Examples
    --------
    >>> from_text(to_text("step 1")), json.loads(from_text(to_text({"stage": 0})))
    ('step 1', {'stage': 0})
    """
    text = value if isinstance(value, str) else json.dumps(value)
    return np.frombuffer(text.encode("utf-8", "replace"), np.uint8)


def from_text(array: Any) -> str:
    """Return a text that `to_text` made an array of."""
    return bytes(array).decode("utf-8", "replace")
