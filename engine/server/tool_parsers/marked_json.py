"""Tool calls in JSON between markers, as Hermes, Kimi K2, DeepSeek V3.1 and others write them.

A row of `Marks` describes a format: call objects with a name, one after the other or in an array,
or a name before each call's arguments.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from engine.server.markers import Markers
from engine.server.tool_parsers._parser import MAX_CALLS, StateParser
from engine.server.tool_parsers.call_grammar import (
    CallGrammar,
    Function,
    Section,
    choice,
    const,
    filled,
    sequence,
)
from engine.server.tool_parsers.call_reader import ArgumentsReader, KeyedCallReader, is_tool_name
from engine.server.tool_parsers.events import ToolCallStart, random_id

__all__ = ["MarkedJsonParser", "Marks", "marked_calls"]

_MAX_HEAD_CHARS = 400


@dataclass(frozen=True)
class Marks:
    """Markers of one format.

    Attributes
    ----------
    opening, closing : str
        Around one or several calls. The closing one may be missing, also in an answer.
    call : str
        Before each call's name; empty if calls are objects that have one.
    head : re.Pattern
        What matches the text between `call` and the arguments. Group "name" is the name; a group
        "id" is the call's id, which the template wants back: it ends with ":" and a number.
    done : tuple of str
        What may follow a call.
    is_array : bool
        Whether the objects are items of an array.
    is_keyed : bool
        Whether an object's only key is the name, and its value the arguments.
    written : str
        How a call is written behind `opening` or `call`: with "$name", "$arguments" and "$index",
        the digits of a number.
    between : str
        Text between calls, or between their sections; in an array after the comma.
    """

    opening: str
    closing: str
    call: str = ""
    head: re.Pattern[str] = re.compile(r"\s*(?P<name>.+?)\s*")
    done: tuple[str, ...] = ()
    is_array: bool = False
    is_keyed: bool = False
    written: str = '{"name": "$name", "arguments": $arguments}'
    between: str = "\n"


def marked_calls(marks: Marks, functions: Sequence[Function]) -> CallGrammar:
    """Return the grammar of calls of the functions."""
    call = choice([filled(marks.written, function) for function in functions])
    if marks.is_array:
        separator = const(f",{marks.between}")
        is_word = marks.opening.isalpha()  # An opening such as "functools" is also a word of prose.
        begin = f"{marks.opening}[" if is_word else marks.opening
        bracket = "" if is_word else "["
        return CallGrammar(Section(begin, call, f"]{marks.closing}", bracket, separator))
    if not marks.call:
        return CallGrammar(Section(marks.opening, call, marks.closing, between=marks.between))
    call = sequence(const(marks.call), call, const(marks.done[-1]))
    return CallGrammar(Section(marks.opening, call, marks.closing, separator=const(marks.between)))


class MarkedJsonParser(StateParser):
    """Reads the calls of one format.

    Parameters
    ----------
    marks : Marks
    names : collection of str, optional
        Functions that may be called; None allows all.
    make_id : callable, optional
        Returns an id for a new call.
    """

    def __init__(
        self,
        marks: Marks,
        names: Collection[str] | None = None,
        make_id: Callable[[], str] = random_id,
    ) -> None:
        super().__init__(names, make_id)
        self._marks = marks
        self._opening = Markers(marks.opening)
        self._place = "["  # in an array: what comes next, "[", "{", "," or, behind it, ""
        self._has_call = False  # in the section
        self._head = ""  # text between `call` and the arguments so far
        self._ids: set[str] = set()  # ids of calls that the model has written
        given = (marks.opening, marks.closing, marks.call, *marks.done)
        self.markers = tuple(marker for marker in given if marker.strip())

    def _in_text(self, text: str, at: int, is_last: bool) -> int:
        found, marker = self._opening.find(text, at, is_last)
        self._text(text[at:found])
        if marker is None:
            return found
        self._hold(marker)
        self._place = "[" if self._marks.is_array else ""
        self._has_call = False
        self._state = self._in_section
        return found + len(marker)

    def _in_section(self, text: str, at: int, is_last: bool) -> int:
        """Read what follows the opening marker, or a call."""
        at = self._skip_space(text, at)
        if at == len(text):
            return at
        if self._place in ("[", ",") and text[at] in (self._place, "]"):
            return self._in_array(text, at)
        if text[at] == "{" and not self._marks.call and self._may_begin():
            reader = None
            if self._marks.is_keyed:
                given = self._num_calls, self._make_id(), self._names, self._take_held()
                reader = KeyedCallReader(*given)
            self._begin_call(reader)
            return at
        return self._at_marker(text, at, is_last)

    def _may_begin(self) -> bool:
        is_next = self._place == "{" if self._marks.is_array else True
        return is_next and self._num_calls < MAX_CALLS

    def _in_array(self, text: str, at: int) -> int:
        """Read a bracket or a comma of the array."""
        if text[at] == "]" and self._place == "[":
            self._fail()
            return at
        if text[at] == "]":
            self._held.clear()
            self._place = ""
            self._state = self._in_section if self._marks.closing else self._in_text
        else:
            self._hold(text[at])
            self._place = "{"
        return at + 1

    def _at_marker(self, text: str, at: int, is_last: bool) -> int:
        """Read a marker within the section, or its end."""
        marks = self._marks
        after = (*marks.done, marks.closing) if self._has_call else ()
        expected = [mark for mark in (*after, marks.call) if mark and not self._place]
        rest = text[at : at + max(map(len, expected), default=0)]
        for mark in expected:
            if rest.startswith(mark):
                return self._pass_marker(mark, at)
        if not is_last and any(mark.startswith(rest) for mark in expected):
            return at
        if is_last and any(mark.startswith(rest) for mark in after):  # one that was cut
            return len(text)
        self._fail()
        return at

    def _pass_marker(self, mark: str, at: int) -> int:
        if mark == self._marks.call:
            if self._num_calls >= MAX_CALLS:
                self._fail()
                return at
            self._hold(mark)
            self._head = ""
            self._state = self._in_head
        elif mark == self._marks.closing:
            self._held.clear()
            self._state = self._in_text
        return at + len(mark)

    def _in_head(self, text: str, at: int, _: bool) -> int:
        """Read a call's name, up to its arguments."""
        found = text.find("{", at)
        # What follows a head that is too long is read as text, however much of it has arrived.
        most = at + _MAX_HEAD_CHARS + 1 - len(self._head)
        end = min(len(text) if found < 0 else found, most)
        self._hold(text[at:end])
        self._head += text[at:end]
        if len(self._head) > _MAX_HEAD_CHARS:
            self._fail()
            return end
        if found < 0:
            return end
        match = self._marks.head.fullmatch(self._head)
        if match is None or not is_tool_name(match["name"], self._names):
            self._fail()
            return end
        source = self._take_held()
        has_id = "id" in self._marks.head.groupindex
        call_id = self._own_id(match["id"].strip()) if has_id else self._make_id()
        start = ToolCallStart(self._num_calls, call_id, match["name"], source)
        self._begin_call(ArgumentsReader(start))
        return end

    def _own_id(self, call_id: str) -> str:
        """Return a call's id, with the next free number if another call of the answer has it."""
        name, _, number = call_id.rpartition(":")
        while call_id in self._ids:
            number = str(int(number) + 1)
            call_id = f"{name}:{number}"
        self._ids.add(call_id)
        return call_id

    def _end_call(self) -> None:
        self._has_call = True
        if self._marks.is_array:
            self._place = ","
        self._state = self._in_section
