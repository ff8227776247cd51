"""`SurrogateGate`: JSON text in pieces, without escapes of unpaired surrogates."""

from __future__ import annotations

import re

__all__ = ["SurrogateGate"]

_HIGH = r"\\u[dD][89abAB][0-9a-fA-F]{2}"
_LOW = r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_PART = r"\\(?:u[0-9a-fA-F]{0,3})?"  # the beginning of an escape
# What is kept is the first group: a pair, or an escape of one letter. Half of a pair has no group.
_ESCAPE = re.compile(rf"({_HIGH}{_LOW}|\\[^u])|{_HIGH}|{_LOW}", re.DOTALL)
# An escape at the end of the text, which later text may complete. An even number of backslashes in
# front of it are escapes of backslashes.
_UNDECIDED = re.compile(rf"(?<!\\)(?:\\\\)*({_HIGH}(?:{_PART})?|{_PART})\Z")
_REPLACEMENT = r"\ufffd"


class SurrogateGate:
    r"""Replaces escapes of unpaired surrogates by that of U+FFFD.

    A model may write half of a pair, ``"\ud83d"``. No UTF-8 text can hold it: a server that decodes
    it cannot send it, and refuses it when the client sends it back.

    Examples
    --------
    >>> gate = SurrogateGate()
    >>> print(gate.push(r'{"a": "\ud8'), gate.push(r'3d\ude00", "b": "\ud83d"}'), sep="|")
    {"a": "|\ud83d\ude00", "b": "\ufffd"}
    """

    def __init__(self) -> None:
        self._pending = ""  # an escape that may become another one

    def push(self, text: str) -> str:
        """Add text; return what later text can no longer change."""
        text = self._pending + text
        self._pending = ""
        if "\\" not in text:
            return text
        if (found := _UNDECIDED.search(text)) is not None:
            self._pending = found[1]
            text = text[: found.start(1)]
        return _replaced(text)

    def finish(self) -> str:
        """Return the rest of the text."""
        rest = self._pending
        self._pending = ""
        return _replaced(rest)


def _replaced(text: str) -> str:
    return _ESCAPE.sub(lambda match: match[1] or _REPLACEMENT, text)
