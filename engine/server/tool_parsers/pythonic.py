"""Tool calls that look like calls of functions, as Llama 4, OLMo 3, LFM2 and Gemma 4 write them.

A row of `CallSyntax` describes a format: ``name(key=value)`` with Python's literals, or
``call:name{key:value}`` with Gemma's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from engine.server.markers import Markers
from engine.server.tool_parsers._parser import MAX_CALLS, SEPARATORS, SPACE, StateParser
from engine.server.tool_parsers.call_grammar import (
    CallGrammar,
    Form,
    Function,
    Section,
    choice,
    const,
    filled,
    sequence,
)
from engine.server.tool_parsers.call_reader import is_tool_name
from engine.server.tool_parsers.events import ToolCallStart, random_id
from engine.server.tool_parsers.literals import LiteralReader

__all__ = ["CallSyntax", "PythonicParser", "pythonic_calls"]

_MAX_NAME_CHARS = 256
_NAME = re.compile(r"""[^\s()\[\]{}<>"'=,:;]*""")


@dataclass(frozen=True)
class CallSyntax:
    """Syntax of one format.

    Attributes
    ----------
    opening, closing : str
        Markers around one or several calls. The closing one may be missing in an answer.
    is_list : bool
        Whether the calls are in square brackets.
    is_bare : bool
        Whether the brackets may stand at the start of a line, without markers.
    before : str
        Text before each name.
    opener : str
        The bracket before the arguments: "(", or "{" where they are written as Gemma does.
    marker : str
        Marker before and after a string, in place of quotation marks.
    """

    opening: str
    closing: str
    is_list: bool = False
    is_bare: bool = False
    before: str = ""
    opener: str = "("
    marker: str = ""


def pythonic_calls(syntax: CallSyntax, functions: Sequence[Function]) -> CallGrammar:
    """Return the grammar of calls: keyword arguments in JSON, or Gemma's literals."""
    if syntax.marker:
        written = f"{syntax.before}$name$arguments"
        calls = [filled(written, one, _literals(syntax, one)) for one in functions]
        return CallGrammar(Section(syntax.opening, choice(calls), syntax.closing, between=""))
    call = choice([filled("$name($arguments)", one, _arguments(one)) for one in functions])
    separator = const(", ")
    if not syntax.is_list:
        line = sequence(const("\n"), call)
        marked = Section(syntax.opening, line, f"\n{syntax.closing}", separator=const(""))
        return CallGrammar(marked)
    marked = Section(syntax.opening, call, f"]{syntax.closing}", "[", separator)
    if not syntax.is_bare:
        return CallGrammar(marked)
    names = "|".join(re.escape(function.name) for function in functions)
    like_a_call = rf"\s*\[\s*(?:{names})\s*\((?s:.*)"
    firsts = tuple((f"{one.name}(", sequence(_arguments(one), const(")"))) for one in functions)
    bare = Section(
        "[",
        call,
        "]",
        separator=separator,
        starts_line=True,
        firsts=firsts,
        excludes=(rf"(?:(?s:.*)\n)?{like_a_call}",),
    )
    return CallGrammar(marked, bare)


def _arguments(function: Function) -> Form:
    return {
        "type": "keyword_values",
        "json_schema": function.schema,
        "repeats_others": not function.is_strict,
    }


def _literals(syntax: CallSyntax, function: Function) -> Form:
    return {
        "type": "literal_values",
        "json_schema": function.schema,
        "begin": syntax.marker,
        "end": syntax.marker,
        "repeats_others": not function.is_strict,
    }


class PythonicParser(StateParser):
    """Reads the calls of one format.

    Values without a name are those of the function's parameters in the order of its schema; without
    a schema such a call is text.

    Parameters
    ----------
    syntax : CallSyntax
    names : collection of str, optional
        Functions that may be called, preferably a mapping to the schemas of their parameters; None
        allows all.
    make_id : callable, optional
        Returns an id for a new call.
    """

    def __init__(
        self,
        syntax: CallSyntax,
        names: Collection[str] | None = None,
        make_id: Callable[[], str] = random_id,
    ) -> None:
        super().__init__(names, make_id)
        self._syntax = syntax
        self._starts = Markers(syntax.opening, *(["\n"] if syntax.is_bare else []))
        self._is_bracketed = False  # whether a bracket around the calls is open
        self._has_call = False  # whether the section has a call
        self._name = ""
        if syntax.is_bare:
            self._state = self._at_line_start
        self.markers = tuple(filter(None, (syntax.opening, syntax.closing, syntax.marker)))

    # ---- before the calls

    def _in_text(self, text: str, at: int, is_last: bool) -> int:
        found, marker = self._starts.find(text, at, is_last)
        if marker == "\n":
            self._state = self._at_line_start
            found += 1
        self._text(text[at:found])
        if marker != self._syntax.opening:
            return found
        self._hold(marker)
        self._is_bracketed = self._has_call = False
        self._state = self._before_calls
        return found + len(marker)

    def _at_line_start(self, text: str, at: int, is_last: bool) -> int:
        """Read the bracket before calls without a marker."""
        match = SPACE.match(text, at)
        assert match is not None  # the pattern also matches an empty string
        self._text(match[0])
        at = match.end()
        if at == len(text):
            return at
        self._has_call = False
        self._state = self._before_calls if text[at] == "[" else self._in_text
        return at

    def _before_calls(self, text: str, at: int, is_last: bool) -> int:
        at = self._skip_space(text, at)
        if at == len(text):
            return at
        self._state = self._before_call
        if self._syntax.is_list and text[at] == "[":
            self._is_bracketed = True
            self._hold("[")
            return at + 1
        return at

    # ---- between calls

    def _before_call(self, text: str, at: int, is_last: bool) -> int:
        """Read what precedes a name, or follows the last call."""
        at = self._skip(SEPARATORS if self._has_call else SPACE, text, at)
        if at == len(text):
            return at
        if self._has_call and self._is_bracketed and text[at] == "]":
            self._held.clear()
            self._state = self._after_calls
            return at + 1
        if self._has_call:
            end = self._closed(text, at, is_last)
            if end is None or end > at:
                return at if end is None else end
        before = self._syntax.before
        rest = text[at : at + len(before)]
        if rest == before and self._num_calls < MAX_CALLS:
            self._hold(before)
            self._name = ""
            self._state = self._in_name
            return at + len(before)
        if is_last or not before.startswith(rest) or rest == before:
            self._fail()
        return at

    def _closed(self, text: str, at: int, is_last: bool) -> int | None:
        """Return the end of the closing marker at `at`, `at` without one, or None to wait."""
        closing = self._syntax.closing
        rest = text[at : at + len(closing)]
        if not closing.startswith(rest):
            return at
        if rest != closing and not is_last:
            return None
        self._held.clear()
        self._state = self._at_line_start if self._syntax.is_bare else self._in_text
        return at + len(rest)

    def _after_calls(self, text: str, at: int, is_last: bool) -> int:
        """Read the marker behind the closing bracket, which may be missing."""
        at = self._skip_space(text, at)
        if at == len(text):
            return at
        end = self._closed(text, at, is_last)
        if end is None:
            return at
        if end == at:
            is_line = self._syntax.is_bare and "\n" in "".join(self._held)
            self._fail()
            if is_line:
                self._state = self._at_line_start
        return end

    # ---- a call

    def _in_name(self, text: str, at: int, is_last: bool) -> int:
        match = _NAME.match(text, at, at + _MAX_NAME_CHARS + 1 - len(self._name))
        assert match is not None  # the pattern also matches an empty string
        at = match.end()
        self._hold(match[0])
        self._name += match[0]
        if len(self._name) > _MAX_NAME_CHARS:
            self._fail()
            return at
        if at == len(text):
            return at
        opener = self._syntax.opener
        name = self._name
        if text[at] != opener or not is_tool_name(name, self._names):
            self._fail()
            return at
        properties = (self._schema_of(name) or {}).get("properties")
        start = ToolCallStart(self._num_calls, self._make_id(), name, self._take_held())
        positional = tuple(properties) if isinstance(properties, Mapping) else ()
        self._begin_call(LiteralReader(start, opener, self._syntax.marker, positional))
        return at + 1

    def _end_call(self) -> None:
        self._has_call = True
        self._state = self._before_call
