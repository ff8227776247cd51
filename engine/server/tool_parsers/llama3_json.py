"""Llama 3's tool calls: `{"name": ..., "parameters": {...}}`, optionally after a marker."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence

from engine.server.markers import Markers
from engine.server.tool_parsers._parser import MAX_CALLS, SPACE, StateParser
from engine.server.tool_parsers.call_grammar import (
    CallGrammar,
    Function,
    Section,
    choice,
    const,
    filled,
)
from engine.server.tool_parsers.events import random_id

__all__ = ["Llama3JsonParser", "llama3_json_calls"]

_TAG = "<|python_tag|>"
_MARKERS = Markers("\n", _TAG)
_SEPARATORS = re.compile(r"[\s;]*")
_BEGIN = '{"name": "'
_LIKE_A_CALL = r'\{\s*"(?:name|type|id|parameters)"(?s:.*)'


def llama3_json_calls(functions: Sequence[Function]) -> CallGrammar:
    """Return the grammar of calls of the functions."""
    call = choice([filled('$name", "parameters": $arguments}', one) for one in functions])
    after_tag = choice(
        [filled(_BEGIN + '$name", "parameters": $arguments}', one) for one in functions]
    )
    separator = const(f"; {_BEGIN}")
    excludes = (rf"[\s;]*{_LIKE_A_CALL}", rf"(?s:.*)\n\s*{_LIKE_A_CALL}")
    return CallGrammar(
        Section(_BEGIN, call, separator=separator, starts_line=True, excludes=excludes),
        Section(_TAG, after_tag, separator=const("; ")),
    )


class Llama3JsonParser(StateParser):
    """Reads objects at the start of a line, after `<|python_tag|>`, or after a call and a `;`.

    An object is a call if it contains a name and parameters, preceded by nothing but "type" and
    "id"; other objects are text.
    """

    markers: tuple[str, ...] = (_TAG,)
    requires_arguments = True

    def __init__(
        self, names: Collection[str] | None = None, make_id: Callable[[], str] = random_id
    ) -> None:
        super().__init__(names, make_id)
        self._state = self._at_line_start

    def _at_line_start(self, text: str, at: int, is_last: bool) -> int:
        return self._expect_call(SPACE, text, at, is_last)

    def _end_call(self) -> None:
        self._state = self._after_call

    def _after_call(self, text: str, at: int, is_last: bool) -> int:
        return self._expect_call(_SEPARATORS, text, at, is_last)

    def _expect_call(self, between: re.Pattern[str], text: str, at: int, is_last: bool) -> int:
        """Skip the separators before a call; if no call follows, they are text."""
        if not self._held:  # white space before the first separator is outside of the calls
            match = SPACE.match(text, at)
            assert match is not None  # the pattern also matches an empty string
            self._text(match[0])
            at = match.end()
        at = self._skip(between, text, at)
        rest = text[at : at + len(_TAG)]
        if not rest or (_TAG.startswith(rest) and rest != _TAG and not is_last):
            return at
        if self._num_calls < MAX_CALLS and (rest == _TAG or rest[0] == "{"):
            if rest[0] == "{":
                self._begin_call()
                return at
            self._hold(_TAG)
            self._state = self._at_line_start
            return at + len(_TAG)
        self._give_back()
        self._state = self._in_text
        return at

    def _in_text(self, text: str, at: int, is_last: bool) -> int:
        """Pass the rest of the line through as text."""
        found, marker = _MARKERS.find(text, at, is_last)
        if marker == "\n" or (marker and self._num_calls >= MAX_CALLS):
            found += len(marker)
        self._text(text[at:found])
        if marker is not None:
            self._state = self._at_line_start
        return found
