"""`PythonString`: incrementally reads a Python string literal, as JSON text."""

from __future__ import annotations

import json
import re
import unicodedata

__all__ = ["PythonString", "json_text"]

_MAX_NAME_CHARS = 100  # maximum length of a character's name, such as BULLET in "\N{BULLET}"
_SIMPLE = dict(zip("\\'\"abfnrtv", "\\'\"\a\b\f\n\r\t\v", strict=True)) | {"\n": ""}
_NUM_HEX = {"x": 2, "u": 4, "U": 8}
_HEX = re.compile(r"[0-9a-fA-F]*")
_OCTAL = re.compile(r"[0-7]{1,3}")
_PLAIN = {quote: re.compile(rf"[^\\{quote}]*") for quote in "'\""}


def json_text(text: str) -> str:
    """Return a text as JSON without its quotes.

    Examples
    --------
    >>> json_text('a "b"')
    'a \\\\"b\\\\"'
    """
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which UTF-8 cannot encode
        return json.dumps(text)[1:-1]
    return json.dumps(text, ensure_ascii=False)[1:-1]


class PythonString:
    """Reads the text of one literal behind its opening quotes.

    Line breaks are read in all literals, though Python allows them only between triple quotes:
    models write them. An unknown escape is its own text, as in Python.

    Parameters
    ----------
    quote : str
        One or three quotation marks.
    is_raw : bool
        Whether backslashes are text.

    Attributes
    ----------
    is_ended, is_failed : bool
        Whether the closing quotes, or an invalid escape, have been read.

    Examples
    --------
    >>> string = PythonString("'")
    >>> string.advance(r"it\\'s a' ", 0), string.is_ended
    ((8, "it's a"), True)
    """

    def __init__(self, quote: str, *, is_raw: bool = False) -> None:
        self.is_ended = self.is_failed = False
        self._quote = quote
        self._is_raw = is_raw
        self._plain = _PLAIN[quote[0]]

    def advance(self, text: str, at: int) -> tuple[int, str]:
        """Read `text[at:]` up to the closing quotes.

        Returns
        -------
        int, str
            Position up to which the text has been read, and what it means as JSON without quotes.
            At most the beginning of an escape or of the closing quotes stays unread.
        """
        parts: list[str] = []
        while not self.is_ended and not self.is_failed:
            match = self._plain.match(text, at)
            assert match is not None  # the pattern also matches an empty string
            parts.append(json_text(match[0]))
            at = match.end()
            if at == len(text):
                break
            end, piece = self._escape(text, at) if text[at] == "\\" else self._quotes(text, at)
            if end == at:
                break
            parts.append(json_text(piece))
            at = end
        return at, "".join(parts)

    def _quotes(self, text: str, at: int) -> tuple[int, str]:
        """Read quotation marks that end the text, or are part of it."""
        rest = text[at : at + len(self._quote)]
        if rest == self._quote:
            self.is_ended = True
            return at + len(rest), ""
        if self._quote.startswith(rest) and at + len(rest) == len(text):
            return at, ""
        return at + 1, text[at]

    def _escape(self, text: str, at: int) -> tuple[int, str]:
        """Read an escape; return its end, or its position if it is not complete."""
        if at + 1 == len(text):
            return at, ""
        kind = text[at + 1]
        if self._is_raw:
            return at + 2, text[at : at + 2]
        if kind in _SIMPLE:
            return at + 2, _SIMPLE[kind]
        if kind in _NUM_HEX:
            return self._hex(text, at, _NUM_HEX[kind])
        if kind == "N":
            return self._named(text, at)
        octal = _OCTAL.match(text, at + 1)
        if octal is None:
            return at + 1, "\\"
        if octal.end() == len(text) and len(octal[0]) < 3:
            return at, ""
        return octal.end(), chr(int(octal[0], 8))

    def _hex(self, text: str, at: int, num_digits: int) -> tuple[int, str]:
        match = _HEX.match(text, at + 2, at + 2 + num_digits)
        assert match is not None  # the pattern also matches an empty string
        if len(match[0]) == num_digits and (code := int(match[0], 16)) <= 0x10FFFF:
            return match.end(), chr(code)
        self.is_failed = len(match[0]) == num_digits or match.end() < len(text)
        return at, ""

    def _named(self, text: str, at: int) -> tuple[int, str]:
        """Read an escape such as ``\\N{BULLET}``."""
        rest = text[at + 2 : at + 4 + _MAX_NAME_CHARS]
        end = rest.find("}")
        if not rest.startswith("{") or end < 0:
            self.is_failed = len(rest) > _MAX_NAME_CHARS + 1 or not "{".startswith(rest[:1])
            return at, ""
        try:
            return at + 3 + end, unicodedata.lookup(rest[1:end])
        except KeyError:
            self.is_failed = True
            return at, ""
