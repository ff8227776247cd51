"""`StateParser`: base class of the parsers, a state machine over text and calls."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from engine.server.markers import TextGate
from engine.server.tool_parsers.call_reader import CallReader, Reader
from engine.server.tool_parsers.events import Event, TextDelta, ToolCallStart, random_id
from engine.server.tool_parsers.json_scanner import Mark

__all__ = ["MAX_CALLS", "SEPARATORS", "SPACE", "StateParser"]

SPACE = re.compile(r"\s*")
SEPARATORS = re.compile(r"[\s,;]*")  # white space and punctuation between calls
MAX_CALLS = 128  # maximum calls per answer; further ones are text


class StateParser:
    """Parser whose current state is a method that consumes text.

    A state method takes the pending text, a position in it, and whether no more text follows. It
    returns the position up to which it has consumed the text. To wait for more text, it consumes
    nothing and keeps the state; at most a marker's length stays pending.

    Parameters
    ----------
    names : collection of str, optional
        Functions that may be called; a call to any other function is text. None: allow all.
    make_id : callable, optional
        Returns an id for a new call.
    """

    markers: tuple[str, ...] = ()
    requires_arguments = False

    def __init__(
        self, names: Collection[str] | None = None, make_id: Callable[[], str] = random_id
    ) -> None:
        self._names = names
        self._make_id = make_id
        self._gate = TextGate()
        self._events: list[Event] = []
        self._pending = ""
        self._num_calls = 0
        self._reader: Reader | None = None
        self._held: list[str] = []  # text unless a call follows
        self._state: Callable[[str, int, bool], int] = self._in_text

    def follow_text(self) -> None:
        """Begin after text of the same message, so white space around a first call is kept."""
        self._gate = TextGate(has_text=True)

    def feed(self, delta: str) -> list[Event]:
        """Feed text; return the events that later text can no longer change."""
        self._run(self._pending + delta, is_last=False)
        return self._take_events()

    def finish(self) -> list[Event]:
        """Signal the end of the text; return the events held back so far."""
        self._run(self._pending, is_last=True)
        if self._reader is not None:
            self._events += self._reader.finish()
            if not self._reader.is_started:
                self._text(self._reader.held + self._pending)
            self._reader = None
        held = self._take_held()
        if not SEPARATORS.fullmatch(held):
            self._text(held)
        self._pass(self._gate.finish())
        return self._take_events()

    def _run(self, text: str, is_last: bool) -> None:
        at = 0
        while at < len(text):
            state = self._state
            start = at
            at = state(text, at, is_last)
            if at == start and state == self._state:
                break
        self._pending = text[at:]

    def _take_events(self) -> list[Event]:
        events = self._events
        self._events = []
        return events

    # ---- text

    def _in_text(self, text: str, at: int, is_last: bool) -> int:
        raise NotImplementedError

    def _text(self, text: str) -> None:
        self._pass(self._gate.push(text))

    def _pass(self, text: str) -> None:
        if text:
            self._events.append(TextDelta(text))

    def _hold(self, text: str) -> None:
        self._held.append(text)

    def _skip_space(self, text: str, at: int) -> int:
        return self._skip(SPACE, text, at)

    def _skip(self, pattern: re.Pattern[str], text: str, at: int) -> int:
        """Hold what the pattern matches, which may be nothing; return its end."""
        match = pattern.match(text, at)
        assert match is not None  # the pattern also matches an empty string
        if match[0]:
            self._hold(match[0])
        return match.end()

    def _take_held(self) -> str:
        held = "".join(self._held)
        self._held.clear()
        return held

    def _give_back(self) -> None:
        self._text(self._take_held())

    def _fail(self) -> None:
        """Give back the held text, since no call follows."""
        self._give_back()
        self._state = self._in_text

    # ---- calls

    def _schema_of(self, name: str) -> Mapping[str, Any] | None:
        """Return the schema of a function's parameters, if it is known."""
        schema = self._names.get(name) if isinstance(self._names, Mapping) else None
        return schema if isinstance(schema, Mapping) else None

    def _begin_call(self, reader: Reader | None = None) -> None:
        """Start reading a call."""
        if reader is None:
            reader = CallReader(
                self._num_calls,
                self._make_id(),
                self._names,
                self._take_held(),
                self.requires_arguments,
            )
        self._reader = reader
        self._state = self._in_call

    def _in_call(self, text: str, at: int, _: bool) -> int:
        reader = self._reader
        assert reader is not None  # set by `_begin_call` together with this state
        was_started = reader.is_started
        at, events = reader.feed(text, at)
        if reader.is_started and not was_started:
            start = events[0]
            assert isinstance(start, ToolCallStart)  # nothing precedes it
            events[0] = dataclasses.replace(start, source=self._gate.held + start.source)
            self._gate.cut()
            self._num_calls += 1
        self._events += events
        if reader.mark is not None:
            self._reader = None
            if reader.mark is Mark.FAILED:
                if reader.is_damaged:
                    self._gate.restore()
                self._text(reader.held)
                self._state = self._in_text
            else:
                self._end_call()
        return at

    def _end_call(self) -> None:
        """Select the state that follows a complete call."""
        raise NotImplementedError
