"""gpt-oss's tool calls: messages ``to=functions.NAME`` with JSON, which reasoning leaves whole."""

from __future__ import annotations

from collections.abc import Sequence

from engine.server.harmony import CHANNEL, MARKERS, NEXT_MESSAGE, recipient_of
from engine.server.markers import Markers
from engine.server.tool_parsers._parser import MAX_CALLS, StateParser
from engine.server.tool_parsers.call_grammar import (
    Form,
    Function,
    choice,
    const,
    filled,
    sequence,
)
from engine.server.tool_parsers.call_reader import ArgumentsReader, is_tool_name
from engine.server.tool_parsers.events import ToolCallStart

__all__ = ["HarmonyCalls", "HarmonyParser", "message_before"]

_START = "<|start|>"
_MESSAGE = "<|message|>"
_END = "<|end|>"
_IN_TEXT = Markers(_START, "<|call|>", _END, "<|return|>")
_IN_HEADER = Markers(_MESSAGE)
_NEXT = Markers(NEXT_MESSAGE)
_NO_JSON = "\0"  # a character that JSON has nowhere


_HEADS = tuple(
    f"{head}{constrained}"
    for head in (
        f"{CHANNEL}commentary to=functions.$name",
        f" to=functions.$name{CHANNEL}commentary",
    )
    for constrained in (" <|constrain|>json", " json")
)
_TEXT: Form = {"type": "any_text"}


def message_before(*channels: str) -> Form:
    """Return the format of a message of one of the channels, and the beginning of the next."""
    texts = [
        {"type": "tag", "begin": f"{CHANNEL}{name}{_MESSAGE}", "content": _TEXT, "end": _END}
        for name in channels
    ]
    return sequence(choice(texts), const(f"{_START}assistant"))


class HarmonyCalls:
    """Grammar of messages to some functions; an answer ends with the first. See `CallFormat`."""

    def __init__(self, functions: Sequence[Function]) -> None:
        self._call = choice(
            [
                sequence(
                    choice([filled(head, function) for head in _HEADS]),
                    filled(f"{_MESSAGE}$arguments", function),
                )
                for function in functions
            ]
        )

    def required(self, *, one_call: bool) -> Form:
        """Return the format of a call."""
        return self._call

    def within_text(self, *, one_call: bool, excludes: Sequence[str] = ()) -> Form:
        """Return the format of messages, of which the last may be a call."""
        spoken = ("commentary", "final")
        last = [sequence(const(f"{CHANNEL}{name}{_MESSAGE}"), _TEXT) for name in spoken]
        more = {"type": "star", "content": message_before("analysis", *spoken)}
        return sequence(more, choice([*last, self._call]))


class HarmonyParser(StateParser):
    """Reads the messages to functions that `HarmonyReasoning` keeps in the content.

    A message to another function, or whose text is not JSON, is content without its markup. So
    is one whose JSON goes on where the next message begins.
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

    def _in_call(self, text: str, at: int, is_last: bool) -> int:
        found, marker = _NEXT.find(text, at, is_last)
        if found > at or marker is None:
            return super()._in_call(text[:found], at, is_last)
        super()._in_call(_NO_JSON, 0, is_last)
        return at

    def _end_call(self) -> None:
        self._state = self._in_text
