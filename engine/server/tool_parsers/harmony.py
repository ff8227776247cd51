"""gpt-oss's tool calls: messages ``to=functions.NAME`` with JSON, which reasoning leaves whole."""

from __future__ import annotations

from engine.server.harmony import MARKERS, recipient_of
from engine.server.markers import Markers
from engine.server.tool_parsers._parser import MAX_CALLS, StateParser
from engine.server.tool_parsers.call_reader import ArgumentsReader, is_tool_name
from engine.server.tool_parsers.events import ToolCallStart

__all__ = ["HarmonyParser"]

_START = "<|start|>"
_MESSAGE = "<|message|>"
_IN_TEXT = Markers(_START, "<|call|>", "<|end|>", "<|return|>")
_IN_HEADER = Markers(_MESSAGE)


class HarmonyParser(StateParser):
    """Reads the messages to functions that `HarmonyReasoning` keeps in the content.

    A message to another function, or whose text is not JSON, is content without its markup.
    """

    markers: tuple[str, ...] = MARKERS

    def _in_text(self, text: str, at: int, is_last: bool) -> int:
        found, marker = _IN_TEXT.find(text, at, is_last)
        self._text(text[at:found])
        if marker is None:
            return found
        if marker == _START:
            self._state = self._in_header
        return found + len(marker)

    def _in_header(self, text: str, at: int, is_last: bool) -> int:
        found, marker = _IN_HEADER.find(text, at, is_last)
        self._hold(text[at:found])
        if marker is None:
            return found
        name = recipient_of(self._take_held())
        if name is not None and is_tool_name(name, self._names) and self._num_calls < MAX_CALLS:
            start = ToolCallStart(self._num_calls, self._make_id(), name)
            self._begin_call(ArgumentsReader(start))
        else:
            self._state = self._in_text
        return found + len(_MESSAGE)

    def _end_call(self) -> None:
        self._state = self._in_text
