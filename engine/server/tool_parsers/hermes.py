"""Tool calls of Hermes and Qwen: `<tool_call>{"name": ..., ...}</tool_call>`."""

from __future__ import annotations

from engine.server.markers import Markers
from engine.server.tool_parsers._parser import MAX_CALLS, StateParser

__all__ = ["HermesParser"]

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
_MARKERS = Markers(_OPEN)


class HermesParser(StateParser):
    """Reads calls between `<tool_call>` and `</tool_call>`; the closing marker may be missing."""

    markers: tuple[str, ...] = (_OPEN, _CLOSE)

    def _in_text(self, text: str, at: int, is_last: bool) -> int:
        found, marker = _MARKERS.find(text, at, is_last)
        self._text(text[at:found])
        if marker is None:
            return found
        self._hold(_OPEN)
        if self._num_calls < MAX_CALLS:
            self._begin_call()
        else:
            self._give_back()
        return found + len(_OPEN)

    def _end_call(self) -> None:
        self._state = self._after_call

    def _after_call(self, text: str, at: int, is_last: bool) -> int:
        """Read the closing marker, or another call before it."""
        end = self._skip_space(text, at)
        rest = text[end : end + len(_CLOSE)]
        if rest == _CLOSE:
            self._held.clear()
            self._state = self._in_text
            return end + len(_CLOSE)
        if _CLOSE.startswith(rest):  # at the end of the text, a closing marker that was cut
            return len(text) if is_last else end
        if rest[0] == "{" and self._num_calls < MAX_CALLS:
            self._begin_call()
        else:
            self._give_back()
            self._state = self._in_text
        return end
