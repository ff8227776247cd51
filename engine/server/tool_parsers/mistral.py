"""Mistral's tool calls: `[TOOL_CALLS]` before a JSON array or before `name[ARGS]{...}`."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Sequence

from engine.server.markers import Markers
from engine.server.tool_parsers._parser import MAX_CALLS, StateParser
from engine.server.tool_parsers.call_grammar import (
    CallGrammar,
    Function,
    Section,
    choice,
    const,
    filled,
    listed,
    sequence,
)
from engine.server.tool_parsers.call_reader import ArgumentsReader, is_tool_name
from engine.server.tool_parsers.events import Event, ToolCallStart, random_id
from engine.server.tool_parsers.required import calls_only

__all__ = ["CallListParser", "MistralParser", "mistral_calls", "short_id"]

_MARKER = "[TOOL_CALLS]"
_MARKERS = Markers(_MARKER)
_OBJECT = '{"name": "$name", "arguments": $arguments}'
_HEADER_CHARS = re.compile(r"[\w.:/\[\]\s-]*")
_HEADER = re.compile(r"\s*([\w.:/-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\]\s*)?")
MAX_HEADER_CHARS = 400

short_id = functools.partial(random_id, "", 9)
"""Return a new id as Mistral's templates require it: 9 letters and digits."""


def mistral_calls(functions: Sequence[Function]) -> CallGrammar:
    """Return the grammar of calls of the functions: in an array, or each behind the marker."""
    items = choice([filled(_OBJECT, function) for function in functions])
    array = sequence(const("["), items, const("]"))
    arrays = sequence(const("["), listed(items, const(", "), one_call=False), const("]"))
    one = choice([filled("$name[ARGS]$arguments", function) for function in functions])
    return CallGrammar(
        Section(_MARKER, choice([array, one]), between="", several=choice([arrays, one]))
    )


class MistralParser(StateParser):
    """Reads the calls after each `[TOOL_CALLS]` in either format."""

    markers: tuple[str, ...] = (_MARKER, "[CALL_ID]", "[ARGS]")

    def __init__(
        self, names: Collection[str] | None = None, make_id: Callable[[], str] = short_id
    ) -> None:
        super().__init__(names, make_id)
        self._num_header = 0  # characters of the function name so far
        self._is_array = False

    def _in_text(self, text: str, at: int, is_last: bool) -> int:
        found, marker = _MARKERS.find(text, at, is_last)
        self._text(text[at:found])
        if marker is None:
            return found
        self._hold(_MARKER)
        if self._num_calls < MAX_CALLS:
            self._state = self._after_marker
        else:
            self._give_back()
        return found + len(_MARKER)

    def _after_marker(self, text: str, at: int, _: bool) -> int:
        """Detect the format from the next character."""
        at = self._skip_space(text, at)
        if at == len(text):
            return at
        self._is_array = text[at] == "["
        if self._is_array:
            self._hold("[")
            self._state = self._at_item
            return at + 1
        self._num_header = 0
        self._state = self._in_header
        return at

    # ---- an array

    def _at_item(self, text: str, at: int, _: bool) -> int:
        at = self._skip_space(text, at)
        if at < len(text):
            if text[at] == "{" and self._num_calls < MAX_CALLS:
                self._begin_call()
            else:
                self._fail()
        return at

    def _end_call(self) -> None:
        self._state = self._after_item if self._is_array else self._in_text

    def _after_item(self, text: str, at: int, _: bool) -> int:
        at = self._skip_space(text, at)
        if at == len(text):
            return at
        if text[at] == ",":
            self._hold(",")
            self._state = self._at_item
            return at + 1
        if text[at] == "]":
            self._held.clear()
            self._state = self._in_text
            return at + 1
        self._fail()
        return at

    # ---- a name and its arguments

    def _in_header(self, text: str, at: int, _: bool) -> int:
        match = _HEADER_CHARS.match(text, at, at + MAX_HEADER_CHARS - self._num_header)
        assert match is not None  # the pattern also matches an empty string
        self._hold(match[0])
        self._num_header += len(match[0])
        at = match.end()
        if at < len(text):
            self._begin_arguments() if text[at] == "{" else self._fail()
        return at

    def _begin_arguments(self) -> None:
        source = "".join(self._held)
        header = source.partition(_MARKER)[2]
        match = _HEADER.fullmatch(header)
        if not header.strip():  # no name: a single call object follows
            self._begin_call()
        elif match is not None and is_tool_name(match[1], self._names):
            self._held.clear()
            start = ToolCallStart(self._num_calls, self._make_id(), match[1], source)
            self._begin_call(ArgumentsReader(start))
        else:
            self._fail()


class CallListParser(MistralParser):
    """Reads an answer that is constrained to a JSON array of calls.

    The array is not content: if the text ends before a call's arguments, the call is dropped, and a
    call that is nested too deeply ends there, incomplete.
    """

    markers: tuple[str, ...] = ()

    def __init__(
        self, names: Collection[str] | None = None, make_id: Callable[[], str] = random_id
    ) -> None:
        super().__init__(names, make_id)
        self._state = self._at_start

    def _at_start(self, text: str, at: int, _: bool) -> int:
        at = self._skip_space(text, at)
        if at == len(text):
            return at
        if text[at] != "[":
            self._fail()
            return at
        self._is_array = True
        self._hold("[")
        self._state = self._at_item
        return at + 1

    def _in_text(self, text: str, at: int, is_last: bool) -> int:
        self._text(text[at:])
        return len(text)

    def finish(self) -> list[Event]:
        """Signal the end of the text; return the events held back so far."""
        if self._reader is not None and not self._reader.is_started:
            self._reader = None
        self._held.clear()
        return super().finish()

    def _take_events(self) -> list[Event]:
        events = super()._take_events()
        if not self._num_calls:  # no list so far
            return events
        return calls_only(events)
