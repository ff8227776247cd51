"""`JsonScanner`: incrementally validates a JSON object, and stops at its values.

Its position is a stack of brackets and one state, so every character is read once, however the text
is split.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Callable
from typing import Any

__all__ = ["JsonScanner", "Mark", "begins_json_object", "complete_values", "is_json_object"]

MAX_DEPTH = 64
MAX_NUMBER_CHARS = 400
MAX_KEY_CHARS = 64

_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_NUMBER_CHARS = re.compile(r"[-+.0-9eE]*")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_LITERALS = ("true", "false", "null")
_MARKS = re.compile(r'"(?:[^"\\]|\\.)*+"|["{}\[\],]', re.DOTALL)
_CLOSERS = {"{": "}", "[": "]"}
_HEX = frozenset("0123456789abcdefABCDEF")


class Mark(enum.Enum):
    """Why the scanner has stopped."""

    VALUE = 0  # before the first character of a top-level value; see `key`
    VALUE_END = 1  # after the last character of a top-level value
    END = 2  # after the object's closing brace
    FAILED = 3  # before the first invalid character


_State = Callable[[str, int], tuple[int, Mark | None]]


class JsonScanner:
    """Scans one JSON object, and stops at its top-level values.

    Attributes
    ----------
    key : str
        Key of the current value, with escapes as written; at most `MAX_KEY_CHARS` characters.

    Examples
    --------
    >>> scanner, text = JsonScanner(), '{"a": [1, 2]}'
    >>> scanner.advance(text, 0), scanner.key
    ((6, <Mark.VALUE: 0>), 'a')
    >>> scanner.advance(text, 6), scanner.advance(text, 12)
    ((12, <Mark.VALUE_END: 1>), (13, <Mark.END: 2>))
    """

    def __init__(self) -> None:
        self.key = ""
        self._state: _State = self._start
        self._closers: list[str] = []  # closing brackets for the open ones
        self._token = ""  # number or literal so far
        self._is_key = False  # whether the current string is a key
        self._num_hex = 0  # digits still missing in a \u escape

    def advance(self, text: str, start: int) -> tuple[int, Mark | None]:
        """Scan `text[start:]` up to the next mark.

        Returns
        -------
        int, Mark or None
            Position of the stop and its mark; None at the end of the text.
        """
        mark = None
        while mark is None and start < len(text):
            start, mark = self._state(text, start)
        return start, mark

    # ---- between values

    def _start(self, text: str, at: int) -> tuple[int, Mark | None]:
        at = _after_space(text, at)
        if at < len(text) and text[at] != "{":
            return at, Mark.FAILED
        return self._begin_value(text, at)

    def _first_key(self, text: str, at: int) -> tuple[int, Mark | None]:
        at = _after_space(text, at)
        if at < len(text) and text[at] == "}":
            return self._close(at)
        return self._next_key(text, at)

    def _next_key(self, text: str, at: int) -> tuple[int, Mark | None]:
        at = _after_space(text, at)
        if at == len(text):
            return at, None
        if text[at] != '"':
            return at, Mark.FAILED
        if len(self._closers) == 1:
            self.key = ""
        self._is_key = True
        return self._to(self._in_string, at + 1)

    def _colon(self, text: str, at: int) -> tuple[int, Mark | None]:
        at = _after_space(text, at)
        if at == len(text):
            return at, None
        return self._to(self._value, at + 1) if text[at] == ":" else (at, Mark.FAILED)

    def _value(self, text: str, at: int) -> tuple[int, Mark | None]:
        at = _after_space(text, at)
        if at == len(text):
            return at, None
        self._state = self._begin_value
        return at, Mark.VALUE if len(self._closers) == 1 else None

    def _first_item(self, text: str, at: int) -> tuple[int, Mark | None]:
        at = _after_space(text, at)
        if at < len(text) and text[at] == "]":
            return self._close(at)
        return self._begin_value(text, at)

    def _item(self, text: str, at: int) -> tuple[int, Mark | None]:
        return self._begin_value(text, _after_space(text, at))

    def _after_value(self, text: str, at: int) -> tuple[int, Mark | None]:
        at = _after_space(text, at)
        if at == len(text):
            return at, None
        if text[at] == self._closers[-1]:
            return self._close(at)
        if text[at] != ",":
            return at, Mark.FAILED
        return self._to(self._next_key if self._closers[-1] == "}" else self._item, at + 1)

    def _done(self, _: str, at: int) -> tuple[int, Mark | None]:
        return at, Mark.END

    # ---- values

    def _begin_value(self, text: str, at: int) -> tuple[int, Mark | None]:
        if at == len(text):
            return at, None
        first = text[at]
        if first in "{[":
            if len(self._closers) == MAX_DEPTH:
                return at, Mark.FAILED
            self._closers.append("}" if first == "{" else "]")
            return self._to(self._first_key if first == "{" else self._first_item, at + 1)
        if first == '"':
            self._is_key = False
            return self._to(self._in_string, at + 1)
        self._token = ""
        if first in "-0123456789":
            return self._to(self._in_number, at)
        return self._to(self._in_literal, at) if first in "tfn" else (at, Mark.FAILED)

    def _in_string(self, text: str, at: int) -> tuple[int, Mark | None]:
        match = _PLAIN.match(text, at)
        assert match is not None  # the pattern also matches an empty string
        self._add_to_key(match[0])
        at = match.end()
        if at == len(text):
            return at, None
        if text[at] == "\\":
            self._add_to_key("\\")
            return self._to(self._in_escape, at + 1)
        if text[at] != '"':
            return at, Mark.FAILED  # control character
        return self._to(self._colon, at + 1) if self._is_key else self._end_value(at + 1)

    def _in_escape(self, text: str, at: int) -> tuple[int, Mark | None]:
        if self._num_hex:
            if text[at] not in _HEX:
                return at, Mark.FAILED
            self._num_hex -= 1
        elif text[at] == "u":
            self._num_hex = 4
        elif text[at] not in '"\\/bfnrt':
            return at, Mark.FAILED
        self._add_to_key(text[at])
        return self._to(self._in_escape if self._num_hex else self._in_string, at + 1)

    def _in_number(self, text: str, at: int) -> tuple[int, Mark | None]:
        match = _NUMBER_CHARS.match(text, at, at + MAX_NUMBER_CHARS - len(self._token))
        assert match is not None  # the pattern also matches an empty string
        self._token += match[0]
        at = match.end()
        if at == len(text):
            return at, None
        is_number = len(self._token) < MAX_NUMBER_CHARS and _NUMBER.fullmatch(self._token)
        return self._end_value(at) if is_number else (at, Mark.FAILED)

    def _in_literal(self, text: str, at: int) -> tuple[int, Mark | None]:
        token = self._token + text[at]
        if token in _LITERALS:
            return self._end_value(at + 1)
        if not any(literal.startswith(token) for literal in _LITERALS):
            return at, Mark.FAILED
        self._token = token
        return at + 1, None

    # ---- transitions

    def _to(self, state: _State, at: int) -> tuple[int, Mark | None]:
        self._state = state
        return at, None

    def _close(self, at: int) -> tuple[int, Mark | None]:
        self._closers.pop()
        if self._closers:
            return self._end_value(at + 1)
        self._state = self._done
        return at + 1, Mark.END

    def _end_value(self, at: int) -> tuple[int, Mark | None]:
        self._state = self._after_value
        return at, Mark.VALUE_END if len(self._closers) == 1 else None

    def _add_to_key(self, text: str) -> None:
        if self._is_key and len(self._closers) == 1:
            self.key += text[: MAX_KEY_CHARS - len(self.key)]


def _after_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None  # the pattern also matches an empty string
    return match.end()


def is_json_object(text: str) -> bool:
    """Return whether `text` is a JSON object, optionally surrounded by white space.

    Examples
    --------
    >>> is_json_object('{"a": 1} '), is_json_object("[1]"), is_json_object('{"a": 1')
    (True, False, False)
    """
    at, mark = _scanned(text)
    return mark is Mark.END and not text[at:].strip(" \t\n\r")


def begins_json_object(text: str) -> bool:
    """Return whether `text` is the beginning of a JSON object; a complete one is not.

    Examples
    --------
    >>> begins_json_object('{"a": [1, '), begins_json_object('{"a": }'), begins_json_object("{}")
    (True, False, False)
    """
    return _scanned(text)[1] not in (Mark.END, Mark.FAILED)


def _scanned(text: str) -> tuple[int, Mark | None]:
    """Scan an object to its end, its first error or the text's end: (position, last mark)."""
    scanner = JsonScanner()
    at = 0
    mark = None
    while at < len(text) and mark not in (Mark.END, Mark.FAILED):
        at, mark = scanner.advance(text, at)
    return at, mark


def complete_values(text: str) -> dict[str, Any]:
    """Return the JSON object that `text` is or begins; of a beginning, the complete values.

    Clients do the same with a stream.

    Examples
    --------
    >>> complete_values('{"a": 1, "b": [2, {"c": "d'), complete_values("")
    ({'a': 1, 'b': [2, {}]}, {})
    """
    closers: list[str] = []
    end = 0, ""  # the last position where closing all brackets may complete the object
    for match in _MARKS.finditer(text):
        mark = match[0]
        if mark == '"' or len(closers) > MAX_DEPTH:  # an unfinished string
            break
        if mark in _CLOSERS:
            closers.append(_CLOSERS[mark])
            end = match.end(), "".join(reversed(closers))
        elif mark == ",":
            end = match.start(), "".join(reversed(closers))
        elif mark in "}]" and closers:
            closers.pop()
    for closed in (text + "".join(reversed(closers)), text[: end[0]] + end[1]):
        try:
            found = json.loads(closed)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict):
            return found
    return {}
