"""Incremental search for markers such as `<think>` in streamed text."""

from __future__ import annotations

import re

__all__ = ["Markers", "TextGate"]


class Markers:
    """Finds the first of several markers, or a partial marker at the end of the text.

    Parameters
    ----------
    *markers : str
        No marker may be a prefix of another.

    Examples
    --------
    >>> markers = Markers("<b>")
    >>> markers.find("a <b> c", 0, False), markers.find("a <", 0, False)
    ((2, '<b>'), (2, None))
    """

    def __init__(self, *markers: str) -> None:
        self._markers = markers
        self._first = re.compile("|".join(re.escape(c) for c in {m[0] for m in markers}))
        self._longest = max(map(len, markers))
        self._pattern = re.compile("|".join(map(re.escape, markers)))

    def find(self, text: str, start: int, is_last: bool) -> tuple[int, str | None]:
        """Find the first marker in `text[start:]`; `is_last` means that no more text follows.

        Returns
        -------
        int, str or None
            Position of the marker, and the marker; or the position before which no marker can
            begin, and None.
        """
        match = self._pattern.search(text, start)
        if match is not None:
            return match.start(), match[0]
        if not is_last:
            tail = max(start, len(text) - self._longest + 1)
            for first in self._first.finditer(text, tail):
                if self._begins(text[first.start() :]):
                    return first.start(), None
        return len(text), None

    def _begins(self, text: str) -> bool:
        return any(marker.startswith(text) for marker in self._markers)


class TextGate:
    """Passes text through, from which blocks are cut out.

    White space around a block is kept between two texts, and dropped where there is none before or
    after it. Trailing white space is held back until more text follows.

    Parameters
    ----------
    has_text : bool
        Whether text precedes.

    Examples
    --------
    >>> gate = TextGate()
    >>> gate.push("Hello "), gate.push("you\\n"), gate.cut(), gate.push("\\nBye"), gate.finish()
    ('Hello', ' you', None, '\\n\\nBye', '')
    """

    def __init__(self, *, has_text: bool = False) -> None:
        self._held: list[str] = []
        self._has_text = has_text  # whether anything precedes the held white space
        self._is_after_cut = False  # whether no text has followed the last cut

    @property
    def held(self) -> str:
        """Trailing white space held back so far."""
        return "".join(self._held)

    def push(self, text: str) -> str:
        """Feed text; return the part that can be passed on now."""
        if self._is_after_cut and not self._has_text:
            self._held.clear()
            text = text.lstrip()
        kept = text.rstrip()
        if not kept:
            if text:
                self._held.append(text)
            return ""
        passed = "".join((*self._held, kept))
        self._held = [text[len(kept) :]] if len(kept) < len(text) else []
        self._has_text = True
        self._is_after_cut = False
        return passed

    def cut(self) -> None:
        """Mark the position of a block that was cut out."""
        self._is_after_cut = True

    def restore(self) -> None:
        """Turn the last block into text, with the white space before it, which is dropped here."""
        self._held.clear()
        self._has_text = True
        self._is_after_cut = False

    def finish(self) -> str:
        """Return the trailing white space held back so far, unless a block precedes it."""
        held = "" if self._is_after_cut else self.held
        self._held = []
        return held
