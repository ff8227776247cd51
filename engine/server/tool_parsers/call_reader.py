"""`CallReader`: incrementally reads one call, a JSON object."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Protocol

from engine.server.tool_parsers.events import (
    Event,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from engine.server.tool_parsers.json_scanner import JsonScanner, Mark, is_json_object

__all__ = ["ArgumentsReader", "CallReader", "KeyedCallReader", "Reader", "is_tool_name"]

MAX_NAME_CHARS = 256
ARGUMENTS_KEYS = ("arguments", "parameters")
NAME_KEYS = ("name", "tool_name")
_KNOWN_KEYS = (*NAME_KEYS, *ARGUMENTS_KEYS, "id", "tool_call_id", "type")
_SURROGATE = re.compile("[\ud800-\udfff]")  # UTF-8 cannot encode an unpaired surrogate


def is_tool_name(name: str, names: Collection[str] | None) -> bool:
    """Return whether `name` may be called; with `names` None, any name of up to 256 characters."""
    if names is not None:
        return name in names
    return 1 <= len(name) <= MAX_NAME_CHARS and name.isprintable()


class Reader(Protocol):
    """Incrementally reads one call; the attributes are those of `CallReader`."""

    mark: Mark | None
    is_started: bool
    is_ended: bool
    is_damaged: bool

    @property
    def held(self) -> str:
        """Text that is not part of any event."""

    def feed(self, text: str, at: int) -> tuple[int, list[Event]]:
        """Read `text[at:]` up to the end of the call; return its end position and the events."""

    def finish(self) -> list[Event]:
        """End the call at the end of the text."""


class CallReader:
    """Reads ``{"name": ..., "arguments": {...}}``, with the keys in any order.

    Once the name is known, arguments are streamed as they arrive. Until then everything is held
    back, and becomes text again if the object is not a call.

    Parameters
    ----------
    index : int
    call_id : str
    names : collection of str or None
        Functions that may be called; None: allow all.
    source : str
        Text before the object, which is held back along with it.
    requires_arguments : bool
        Whether an object without arguments is not a call; otherwise, its arguments are ``{}``.

    Attributes
    ----------
    mark : Mark or None
        END or FAILED, once the object has ended or is invalid.
    is_started, is_ended : bool
        Whether the call's start and end events have been returned.
    is_damaged : bool
        Whether the arguments turned out to be invalid after the call's start had been returned.
    """

    def __init__(
        self,
        index: int,
        call_id: str,
        names: Collection[str] | None,
        source: str = "",
        requires_arguments: bool = False,
    ) -> None:
        self.mark: Mark | None = None
        self.is_started = self.is_ended = self.is_damaged = False
        self._index = index
        self._id = call_id
        self._names = names
        self._requires_arguments = requires_arguments
        self._scanner = JsonScanner()
        self._held = [source]  # text in no event: before and after the arguments
        self._keys: set[str] = set()  # which of "name" and "arguments" have been seen
        self._value: list[str] | None = None  # chunks of the current value
        self._name = ""
        self._arguments: str | None = None  # complete arguments, if they precede the name

    @property
    def held(self) -> str:
        """Text that is not part of any event."""
        return "".join(self._held)

    def feed(self, text: str, at: int) -> tuple[int, list[Event]]:
        """Read `text[at:]` up to the end of the object; return its end position and the events."""
        events: list[Event] = []
        while self.mark is None and at < len(text):
            stop, mark = self._scanner.advance(text, at)
            self._take(text[at:stop], events)
            at = stop
            is_fine = True
            if mark is Mark.VALUE:
                is_fine = self._begin_value(text[at], events)
            elif mark is Mark.VALUE_END:
                is_fine = self._end_value(events)
            elif mark is Mark.END:
                is_fine = self.is_started or self._end_object(events)
                self.mark = mark
            if mark is Mark.FAILED or not is_fine:
                self.mark = Mark.FAILED
        if self.mark is Mark.FAILED and self.is_started and not self.is_ended:
            self.is_ended = self.is_damaged = True
            events.append(ToolCallEnd(self._index, is_complete=False, is_damaged=True))
        return at, events

    def finish(self) -> list[Event]:
        """End the call at the end of the text."""
        if not self.is_started or self.is_ended:
            return []
        self.is_ended = True
        return [ToolCallEnd(self._index, is_complete=False)]

    def _take(self, piece: str, events: list[Event]) -> None:
        if self.is_started and not self.is_ended:
            if piece:
                events.append(ToolCallDelta(self._index, piece))
            return
        self._held.append(piece)
        if self._value is not None:
            self._value.append(piece)

    def _begin_value(self, first: str, events: list[Event]) -> bool:
        """Begin a key's value; return False if the object is not a call."""
        key = self._scanner.key
        key = "arguments" if key in ARGUMENTS_KEYS else "name" if key in NAME_KEYS else key
        if key not in ("name", "arguments"):
            return self.is_started or key in _KNOWN_KEYS
        if key in self._keys or first not in ('"' if key == "name" else '{"n'):
            return False
        self._keys.add(key)
        if key == "arguments" and first == "{" and self._name:
            self._start(events)
        else:
            self._value = []
        return True

    def _end_value(self, events: list[Event]) -> bool:
        """End a key's value; return False if the object is not a call."""
        if self.is_started and not self.is_ended:
            self._end(events)
        if self._value is None:
            return True
        value = "".join(self._value)
        self._value = None
        if value.startswith('"'):
            value = json.loads(value)
            if self._scanner.key in NAME_KEYS:
                self._name = value
                return is_tool_name(value, self._names) and self._complete(events)
        self._arguments = "{}" if value == "null" else value
        is_text = self._arguments.isascii() or not _SURROGATE.search(self._arguments)
        return is_text and is_json_object(self._arguments) and self._complete(events)

    def _complete(self, events: list[Event]) -> bool:
        """Add the events of the complete call, if name and arguments are known."""
        if self._name and self._arguments is not None:
            arguments = self._arguments
            self._start(events)
            events.append(ToolCallDelta(self._index, arguments))
            self._end(events)
        return True

    def _end_object(self, events: list[Event]) -> bool:
        if not self._name or self._requires_arguments:
            return False
        self._arguments = "{}"
        return self._complete(events)

    def _start(self, events: list[Event]) -> None:
        events.append(ToolCallStart(self._index, self._id, self._name, self.held))
        self._held.clear()
        self.is_started = True

    def _end(self, events: list[Event]) -> None:
        events.append(ToolCallEnd(self._index))
        self.is_ended = True


class KeyedCallReader(CallReader):
    """Reads ``{"name of the function": {...}}``."""

    def _begin_value(self, first: str, events: list[Event]) -> bool:
        if self._keys or first != "{":
            return False
        name = json.loads(f'"{self._scanner.key}"')
        if not is_tool_name(name, self._names):
            return False
        self._keys.add("name")
        self._name = name
        self._start(events)
        return True

    def _end_object(self, events: list[Event]) -> bool:
        return False


class ArgumentsReader:
    """Incrementally reads the arguments, a JSON object, of a call whose name is known.

    It has the same attributes and methods as `CallReader`.
    """

    def __init__(self, start: ToolCallStart) -> None:
        self.mark: Mark | None = None
        self.is_started = self.is_ended = self.is_damaged = False
        self.held = ""
        self._start = start
        self._scanner = JsonScanner()

    def feed(self, text: str, at: int) -> tuple[int, list[Event]]:
        """Read `text[at:]` up to the end of the object; return its end position and the events."""
        events: list[Event] = []
        if not self.is_started:
            events.append(self._start)
            self.is_started = True
        begin = at
        mark = None
        while at < len(text) and mark not in (Mark.END, Mark.FAILED):
            at, mark = self._scanner.advance(text, at)
        if at > begin:
            events.append(ToolCallDelta(self._start.index, text[begin:at]))
        if mark in (Mark.END, Mark.FAILED):
            self.mark = mark
            self.is_ended = True
            self.is_damaged = mark is Mark.FAILED
            end = ToolCallEnd(self._start.index, not self.is_damaged, self.is_damaged)
            events.append(end)
        return at, events

    def finish(self) -> list[Event]:
        """End the call at the end of the text."""
        if not self.is_started or self.is_ended:
            return []
        self.is_ended = True
        return [ToolCallEnd(self._start.index, is_complete=False)]
