"""`OpenBlock`: finds the end of an open block of reasoning."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from engine.server.markers import Markers
from engine.server.tool_parsers import (
    Event,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    ToolParser,
)

__all__ = ["OpenBlock"]


class OpenBlock:
    """Finds the end of an open block: a closing marker, or else its first tool call.

    A call is held back until the text ends, or until a closing marker after it shows that it is
    part of the reasoning. A closing marker in a call's arguments is part of them.

    Parameters
    ----------
    closing : collection of str
        The closing markers.
    tools : callable or None
        Returns a parser of the tool calls.
    """

    def __init__(self, closing: Collection[str], tools: Callable[[], ToolParser] | None) -> None:
        self._markers = Markers(*closing)
        self._tools = tools() if tools is not None else None
        self._pending = ""  # possible start of the marker
        self._held: list[str] = []  # text after the first `_num_passed` characters
        self._num_passed = 0
        self._num_read = 0
        self._num_text = 0  # characters before the first call
        self._num_start = 0  # characters of the first call before its arguments
        self._num_arguments = 0  # characters of its arguments so far
        self._has_begun = False  # whether the first call has begun
        self._has_call = False  # whether the first call is complete
        self._close: int | None = None  # position of a marker, unless it is in a call's arguments
        self._num_marker = 0  # length of this marker
        self._is_closed = False

    def feed(self, text: str, is_last: bool) -> tuple[str, str | None]:
        """Return the reasoning that is now final, and the text after the block if it has ended."""
        text = self._pending + text
        at = 0
        is_found = True
        while is_found and not self._is_closed:
            found, marker = self._markers.find(text, at, is_last)
            self._read(text[at:found])
            at = found
            is_found = marker is not None
            if marker is not None and not self._is_closed:
                if self._close is None:
                    self._close = self._num_read
                    self._num_marker = len(marker)
                self._read(marker)
                at += len(marker)
        self._pending = text[at:]
        if is_last and not self._is_closed:
            self._note([] if self._tools is None else self._tools.finish())
            self._is_closed = self._close is not None
        if self._is_closed:
            assert self._close is not None
            thought = self._pass(self._close)
            return thought, "".join((*self._held, self._pending))[self._num_marker :]
        if is_last and self._has_begun:
            return self._pass(self._num_text), "".join(self._held)
        return self._pass(self._num_read if is_last else self._num_text), None

    def _pass(self, end: int) -> str:
        """Return the held text up to position `end`."""
        num_chars = end - self._num_passed
        if num_chars <= 0:
            return ""
        held = "".join(self._held)
        self._held = [held[num_chars:]]
        self._num_passed = end
        return held[:num_chars]

    def _read(self, text: str) -> None:
        """Read text without a marker, or a marker."""
        if not text:
            return
        self._held.append(text)
        self._num_read += len(text)
        events = [TextDelta(text)] if self._tools is None else self._tools.feed(text)
        self._note(events)
        if self._close is not None:
            ends = (e for e in events if isinstance(e, (TextDelta, ToolCallEnd)))
            end = next(ends, None)
            if isinstance(end, ToolCallEnd) and end.is_complete:
                self._close = None  # the marker was in its arguments
            else:
                self._is_closed = end is not None

    def _note(self, events: Iterable[Event]) -> None:
        """Find the position of the first call."""
        for event in events:
            if self._has_call:
                return
            if isinstance(event, TextDelta):
                self._num_text += len(event.text)
            elif isinstance(event, ToolCallStart):
                self._has_begun = True
                self._num_start = len(event.source)
                self._num_arguments = 0
            elif isinstance(event, ToolCallDelta):
                self._num_arguments += len(event.arguments)
            elif event.is_damaged:
                self._has_begun = False
                self._num_text += self._num_start + (len(event.source) or self._num_arguments)
            else:
                self._has_call = True
