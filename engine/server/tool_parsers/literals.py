"""`LiteralReader`: incrementally reads arguments that are Python's or Gemma's literals, as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from engine.server.markers import Markers
from engine.server.tool_parsers.events import ToolCallStart
from engine.server.tool_parsers.json_scanner import MAX_DEPTH, MAX_NUMBER_CHARS
from engine.server.tool_parsers.state_reader import State, StateReader
from engine.server.tool_parsers.string_literals import PythonString, json_text
from engine.server.tool_parsers.typed_values import PYTHON_WORDS

__all__ = ["LiteralReader", "token_json"]

_MAX_KEY_CHARS = 256
_SPACE = re.compile(r"\s*")
_WORDS = PYTHON_WORDS | {word: word for word in PYTHON_WORDS.values()}
_DIGITS = r"[0-9](?:_?[0-9])*"
_PREFIXED = "0[xX](?:_?[0-9a-fA-F])+|0[oO](?:_?[0-7])+|0[bB](?:_?[01])+"
_INTEGER = re.compile(rf"[-+]?(?:{_PREFIXED}|0(?:_?0)*|[1-9](?:_?[0-9])*)")
_FLOAT = re.compile(rf"([-+]?)({_DIGITS})?(\.)?({_DIGITS})?([eE][-+]?{_DIGITS})?")
_TOKEN = re.compile(r"[\w.+\-]*")
_PREFIXES = "rRuU"
_QUOTES = re.compile(rf"""([{_PREFIXES}]?)("{{1,3}}|'{{1,3}})""")
_KEYWORD = re.compile(r"([^\W\d][\w.\-]*)(\s*)(=?)")
_BARE_KEY = re.compile(r"""[^\s:,{}\[\]"'<>][^:,{}\[\]"'<>]*""")
_CLOSERS = {"[": "]", "(": ")", "{": "}"}


def token_json(token: str) -> str | None:
    """Return a number or a constant as JSON; None if it is neither.

    Examples
    --------
    >>> token_json("True"), token_json("0x_ff"), token_json("-1_0.e3"), token_json("nan")
    ('true', '255', '-10.0e3', None)
    """
    if token in _WORDS:
        return _WORDS[token]
    if _INTEGER.fullmatch(token):
        return str(int(token, 0))
    match = _FLOAT.fullmatch(token)
    if match is None:
        return None
    sign, whole, point, fraction, exponent = (part.replace("_", "") for part in match.groups(""))
    if not (whole or fraction) or not (point or exponent):
        return None
    decimals = f".{fraction or '0'}" if point else ""
    return f"{sign.strip('+')}{whole.lstrip('0') or '0'}{decimals}{exponent}"


@dataclass
class _Container:
    """An open bracket.

    Attributes
    ----------
    closer : str
    has_keys : bool
    is_empty : bool
        Whether it holds nothing so far.
    mark : int or None
        For a Python parenthesis that may still be either a tuple or a value in parentheses: the
        index, in the parts written, of the place for a tuple's "[".
    """

    closer: str
    has_keys: bool
    is_empty: bool = True
    mark: int | None = None


class LiteralReader(StateReader):
    """Reads the arguments of one call behind their opening bracket, up to the closing one.

    Python's arguments are ``key=value`` in parentheses; Gemma's are ``key:value`` in braces, also
    in nested objects.

    Parameters
    ----------
    start : ToolCallStart
    opener : str
        The opening bracket: "(" before Python's arguments and "{" before Gemma's.
    marker : str
        Marker before and after Gemma's strings; empty for Python.
    positional : sequence of str
        Parameters to which values without a name belong, in order.
    """

    def __init__(
        self,
        start: ToolCallStart,
        opener: str = "(",
        marker: str = "",
        positional: Sequence[str] = (),
    ) -> None:
        super().__init__(start, opener)
        self._is_python = opener == "("
        self._marker = marker
        self._end_of_string = Markers(marker) if marker else None
        self._positional = positional
        self._keys: dict[str, None] = {}  # top-level keys without quotes
        self._has_keyword = False
        self._open = [_Container(_CLOSERS[opener], has_keys=True)]
        self._is_key = False  # whether the current string or token is a key
        self._string: PythonString | None = None
        self._is_text_open = False  # whether another literal may continue the string
        self._token = ""  # number or constant so far

    def _first(self, text: str, at: int) -> int:
        self._state = self._item
        return at

    def _is_undecided(self) -> bool:
        return any(one.mark is not None for one in self._open)

    def _to(self, state: State, at: int) -> int:
        self._state = state
        return at

    def _failed(self, at: int) -> int:
        self._fail()
        return at

    # ---- between values

    def _item(self, text: str, at: int) -> int:
        """Read what follows an opening bracket or a comma."""
        at = _after_space(text, at)
        if at == len(text):
            return at
        top = self._open[-1]
        if text[at] == top.closer:
            return self._close(at)
        if len(self._open) == 1 or (top.has_keys and not self._is_python):
            return self._name(text, at)
        self._begin_item()
        self._is_key = top.has_keys
        return self._to(self._value, at)

    def _name(self, text: str, at: int) -> int:
        """Read a key of the arguments, or one of Gemma's objects."""
        if self._is_python:
            match = _KEYWORD.match(text, at)
            end = at if match is None else match.end()
            if end - at > _MAX_KEY_CHARS:
                return self._failed(at)
            if match is None or (end < len(text) and not match[3]):
                return self._begin_positional(at)
            if not match[3]:
                return at
            self._has_keyword = True
            return self._begin_key(match[1], end)
        if text[at] in "\"'" or self._marker.startswith(text[at]):
            self._begin_item()
            self._is_key = True
            return self._to(self._value, at)
        match = _BARE_KEY.match(text, at, at + _MAX_KEY_CHARS)
        if match is None or (match.end() < len(text) and text[match.end()] != ":"):
            return self._failed(at)
        if match.end() == len(text):
            return at
        return self._begin_key(match[0].rstrip(), match.end() + 1)

    def _begin_positional(self, at: int) -> int:
        index = len(self._keys)
        if self._has_keyword or index >= len(self._positional):
            return self._failed(at)
        return self._begin_key(self._positional[index], at)

    def _begin_key(self, key: str, at: int) -> int:
        if len(self._open) == 1:
            if key in self._keys:
                return self._failed(at)
            self._keys[key] = None
        self._begin_item()
        self._write(json.dumps(key, ensure_ascii=False) + ": ")
        return self._to(self._value, at)

    def _begin_item(self) -> None:
        if not self.is_started:
            self._begin()
        top = self._open[-1]
        if not top.is_empty:
            self._write(", ")
        elif len(self._open) == 1:
            self._write("{")
        top.is_empty = False

    def _colon(self, text: str, at: int) -> int:
        at = _after_space(text, at)
        if at == len(text):
            return at
        if text[at] != ":":
            return self._failed(at)
        self._write(": ")
        self._is_key = False
        return self._to(self._value, at + 1)

    def _after_value(self, text: str, at: int) -> int:
        at = _after_space(text, at)
        if at == len(text):
            return at
        if self._is_text_open:
            end = self._joined(text, at)
            if end is not None:
                return end
            self._is_text_open = False
            self._write('"')
        top = self._open[-1]
        if text[at] == top.closer:
            return self._close(at)
        if text[at] != ",":
            return self._failed(at)
        if top.mark is not None:  # a tuple, not a value in parentheses
            self._decide(top, "[")
        return self._to(self._item, at + 1)

    def _joined(self, text: str, at: int) -> int | None:
        """Open a string that continues the last one, as in Python; return None without one."""
        if text[at] in _PREFIXES and at + 1 == len(text):
            return at
        match = _QUOTES.match(text, at)
        return None if match is None else self._open_quotes(match, at, len(text))

    def _decide(self, top: _Container, bracket: str) -> None:
        assert top.mark is not None
        self._parts[top.mark] = bracket
        top.mark = None

    def _close(self, at: int) -> int:
        top = self._open.pop()
        if not self._open:
            if not self.is_started:
                self._begin()
            self._write("{}" if top.is_empty else "}")
            self._end()
            return at + 1
        if top.mark is not None:
            self._decide(top, "[" if top.is_empty else "")
            self._write("]" if top.is_empty else "")
        else:
            self._write("}" if top.has_keys else "]")
        return self._to(self._after_value, at + 1)

    # ---- values

    def _value(self, text: str, at: int) -> int:
        at = _after_space(text, at)
        if at == len(text):
            return at
        first = text[at]
        if first in "[{(":
            return self._open_bracket(first, at)
        if first in _PREFIXES and at + 1 == len(text):
            return at
        if (match := _QUOTES.match(text, at)) is not None:
            return self._open_quotes(match, at, len(text))
        if self._marker.startswith(first):
            rest = text[at : at + len(self._marker)]
            if rest != self._marker:
                return at if self._marker.startswith(rest) else self._failed(at)
            self._write('"')
            return self._to(self._in_marked, at + len(rest))
        self._token = ""
        return self._to(self._in_token, at)

    def _open_bracket(self, first: str, at: int) -> int:
        is_group = first == "("
        if len(self._open) == MAX_DEPTH or self._is_key or (is_group and not self._is_python):
            return self._failed(at)
        mark = len(self._parts) if is_group else None
        self._open.append(_Container(_CLOSERS[first], has_keys=first == "{", mark=mark))
        self._write("" if is_group else first)
        return self._to(self._item, at + 1)

    def _open_quotes(self, match: re.Match[str], at: int, size: int) -> int:
        """Read the opening quotes of a string, or an empty string."""
        prefix, quotes = match.groups()
        if len(quotes) < 3 and match.end() == size:
            return at
        quote = quotes if len(quotes) == 3 else quotes[0]
        self._string = PythonString(quote, is_raw=prefix in ("r", "R"))
        if not self._is_text_open:
            self._write('"')
        self._is_text_open = False
        return self._to(self._in_string, at + len(prefix) + len(quote))

    def _in_string(self, text: str, at: int) -> int:
        string = self._string
        assert string is not None  # set together with this state
        at, piece = string.advance(text, at)
        self._write(piece)
        if string.is_failed:
            return self._failed(at)
        return self._end_string(at) if string.is_ended else at

    def _in_marked(self, text: str, at: int) -> int:
        """Read a string up to its closing marker."""
        assert self._end_of_string is not None
        found, marker = self._end_of_string.find(text, at, False)
        self._write(json_text(text[at:found]))
        return found if marker is None else self._end_string(found + len(marker))

    def _end_string(self, at: int) -> int:
        self._is_text_open = self._is_python and not self._is_key
        self._write("" if self._is_text_open else '"')
        return self._to(self._colon if self._is_key else self._after_value, at)

    def _in_token(self, text: str, at: int) -> int:
        """Read a number or a constant."""
        match = _TOKEN.match(text, at, at + MAX_NUMBER_CHARS - len(self._token))
        assert match is not None  # the pattern also matches an empty string
        self._token += match[0]
        at = match.end()
        if len(self._token) == MAX_NUMBER_CHARS:
            return self._failed(at)
        if at == len(text):
            return at
        value = token_json(self._token)
        if value is None:
            return self._failed(at)
        self._write(json.dumps(value) if self._is_key else value)
        return self._to(self._colon if self._is_key else self._after_value, at)


def _after_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None  # the pattern also matches an empty string
    return match.end()
