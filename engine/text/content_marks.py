"""Marks that keep the texts of a request from spelling control tokens in a rendered prompt.

A chat template mixes its own text with that of the request. Only its own control tokens, such as
``<|im_end|>``, may become control tokens, whatever it does with the request's text: trim, join,
``tojson``, loops over characters. So each character of a request's text with which a control token
may begin or end is replaced, before rendering, by an unpaired surrogate. No valid text contains
one, templates copy it like any other character, and JSON does not escape it. While a template
compares and searches, `engine.text.marked_sandbox` shows it the original characters.

A template that also joins a control token from pieces (``'<|' + role + '|>'``) could complete it
with characters from a request. For such a template every character of its control tokens is marked.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Any

__all__ = ["ContentMarks", "choose_marks", "has_marks"]

# Marks are low surrogates: two in a row, escaped in JSON, are not read as one character. Those of
# ASCII characters are the ones that Python's error handler "surrogateescape" uses.
_ASCII_MARK = 0xDC80
_OTHER_MARK = 0xDD00
_MAX_MARKS = 0x300
_MAX_REPLACED = 16  # up to that many marks, str.replace is faster than str.translate
_MAX_JOINED = 64  # longest control token, in characters, that a template may join from pieces
_TO_ASCII = bytes(i & 0x7F for i in range(0x100))
_ANY_MARK = re.compile("[\ud800-\udfff]")


class ContentMarks:
    """A mark for each character of an alphabet.

    Parameters
    ----------
    alphabet : str
        The characters to mark, each once.
    in_keys : str
        Those to mark in keys of objects, too; templates look up all others by name.

    Examples
    --------
    >>> marks = ContentMarks("<>", "<>")
    >>> marks.mark("<s>") == "\\udcbcs\\udcbe"
    True
    >>> marks.unmark(marks.mark("<s>"))
    '<s>'
    """

    def __init__(self, alphabet: str, in_keys: str) -> None:
        self.alphabet = alphabet
        self.in_keys = in_keys
        self._marks = {
            ord(c): chr(_ASCII_MARK + ord(c) if c.isascii() else _OTHER_MARK + i)
            for i, c in enumerate(alphabet)
        }
        self._key_marks = {code: self._marks[code] for code in map(ord, in_keys)}
        self._chars = {ord(mark): chr(code) for code, mark in self._marks.items()}
        self._bytes = bytes(i + 0x80 if i in self._marks else i for i in range(0x80)) + bytes(0x80)

    def mark(self, text: str) -> str:
        """Return `text` with every character of the alphabet marked."""
        if text.isascii():  # a faster way to the same
            return text.encode().translate(self._bytes).decode("ascii", "surrogateescape")
        return _replaced(text, self._marks)

    def mark_key(self, text: str) -> str:
        """Return an object's key, marked."""
        return _replaced(text, self._key_marks)

    def unmark(self, text: str) -> str:
        """Return the text as it was before it was marked."""
        if text.isascii():
            return text
        try:
            encoded = text.encode("ascii", "surrogateescape")
        except UnicodeEncodeError:
            return _replaced(text, self._chars)
        return encoded.translate(_TO_ASCII).decode()

    def plain(self, value: Any) -> Any:
        """Return `value` without marks, in lists and objects, too."""
        if isinstance(value, str):
            return self.unmark(value)
        if isinstance(value, (list, tuple)):
            items = map(self.plain, value)
            return tuple(items) if isinstance(value, tuple) else list(items)
        if isinstance(value, dict):
            return {self.plain(key): self.plain(item) for key, item in value.items()}
        return value

    def like(self, text: str, marked: str) -> str:
        """Mark a `text` that an operation made of `marked`: at the same places, or everywhere."""
        if len(text) != len(marked):
            return self.mark(text)
        found = list(text)
        for match in _ANY_MARK.finditer(marked):
            found[match.start()] = self.mark(found[match.start()])
        return "".join(found)


def has_marks(text: str) -> bool:
    """Tell whether `text` has marks, or other unpaired surrogates."""
    return not text.isascii() and _ANY_MARK.search(text) is not None


def choose_marks(tokens: Collection[str], literals: Iterable[str]) -> ContentMarks:
    """Choose the characters to mark.

    Parameters
    ----------
    tokens : collection of str
        The control tokens.
    literals : iterable of str
        Texts that the template holds.
    """
    usable = [[c for c in token if not c.isspace() and c not in '"\\'] for token in tokens]
    ends = {c for chars in usable if chars for c in (chars[0], chars[-1])}
    found = sorted(ends)
    if _joins_tokens(tokens, literals):
        every = {form for chars in usable for c in chars for form in (c, c.lower(), c.upper())}
        found += sorted({form for form in every if len(form) == 1} - ends)
    in_keys = "".join(c for c in sorted(ends) if not c.isalnum() and c != "_")
    return ContentMarks("".join(found[:_MAX_MARKS]), in_keys)


def _joins_tokens(tokens: Collection[str], literals: Iterable[str]) -> bool:
    """Tell whether one literal may begin, and another one end, the same control token."""
    lengths = range(1, _MAX_JOINED)
    texts = list(literals)
    heads = {text[:n] for text in texts for n in lengths}
    tails = {text[-n:] for text in texts for n in lengths}
    for token in tokens:
        size = min(len(token), _MAX_JOINED)
        first = next((n for n in range(1, size) if token[:n] in tails), size)
        last = next((n for n in range(1, size) if token[-n:] in heads), size)
        if first + last < len(token):
            return True
    return False


def _replaced(text: str, table: dict[int, str]) -> str:
    if len(table) > _MAX_REPLACED:
        return text.translate(table)
    for code, new in table.items():
        text = text.replace(chr(code), new)
    return text
