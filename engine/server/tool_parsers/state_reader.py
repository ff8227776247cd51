"""`StateReader`: base class of readers of one call, a state machine over its arguments."""

from __future__ import annotations

from collections.abc import Callable

from engine.server.tool_parsers.events import Event, ToolCallDelta, ToolCallEnd, ToolCallStart
from engine.server.tool_parsers.json_scanner import Mark

__all__ = ["State", "StateReader"]

State = Callable[[str, int], int]
"""Takes text and a position in it; returns the position up to which it has consumed the text."""


class StateReader:
    """Reads a call behind its name; has the attributes and methods of `CallReader`.

    The current state is a method. To wait for more text, it consumes nothing and keeps the state;
    the text that it leaves must be bounded.

    Parameters
    ----------
    start : ToolCallStart
        The call's start event, which `_begin` returns to the parser.
    source : str
        The beginning of the arguments, if it has been read.
    """

    def __init__(self, start: ToolCallStart, source: str = "") -> None:
        self.mark: Mark | None = None
        self.is_started = self.is_ended = self.is_damaged = False
        self._start = start
        self._source = [source]  # text of the arguments
        self._parts: list[str] = []  # JSON text of the arguments that is in no event yet
        self._events: list[Event] = []
        self._state: State = self._first

    @property
    def held(self) -> str:
        """Text that is not part of any event."""
        return "" if self.is_started else "".join((self._start.source, *self._source))

    def feed(self, text: str, at: int) -> tuple[int, list[Event]]:
        """Read `text[at:]` up to the end of the call; return its end position and the events."""
        while self.mark is None and at < len(text):
            state = self._state
            end = state(text, at)
            self._source.append(text[at:end])
            if end == at and state == self._state and self.mark is None:
                break
            at = end
        if self.is_started and not self._is_undecided():
            self._flush()
        if self.mark is Mark.END:
            self.is_ended = True
            self._events.append(ToolCallEnd(self._start.index))
        elif self.mark is Mark.FAILED and self.is_started:
            self.is_ended = self.is_damaged = True
            self._events.append(self._damaged())
        events = self._events
        self._events = []
        return at, events

    def finish(self) -> list[Event]:
        """End the call at the end of the text."""
        if not self.is_started or self.is_ended:
            return []
        self.is_ended = True
        return [ToolCallEnd(self._start.index, is_complete=False)]

    def _first(self, text: str, at: int) -> int:
        """Read the beginning of the arguments."""
        raise NotImplementedError

    def _is_undecided(self) -> bool:
        """Return whether later text may change the arguments written so far."""
        return False

    def _begin(self) -> None:
        """Start the call: text so far can no longer turn out to be no call."""
        self.is_started = True
        self._events.append(self._start)

    def _write(self, arguments: str) -> None:
        self._parts.append(arguments)

    def _flush(self) -> None:
        if arguments := "".join(self._parts):
            self._events.append(ToolCallDelta(self._start.index, arguments))
        self._parts.clear()

    def _end(self) -> None:
        self.mark = Mark.END

    def _fail(self) -> None:
        self.mark = Mark.FAILED

    def _damaged(self) -> ToolCallEnd:
        source = "".join(self._source)
        return ToolCallEnd(self._start.index, is_complete=False, is_damaged=True, source=source)
