"""Events of a tool parser (chunks of text and calls), and the answer they add up to."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

__all__ = [
    "Event",
    "ParsedText",
    "TextDelta",
    "ToolCall",
    "ToolCallDelta",
    "ToolCallEnd",
    "ToolCallStart",
    "ToolParser",
    "collect",
    "random_id",
    "settle",
]


@dataclass(frozen=True)
class TextDelta:
    """Chunk of text outside of calls."""

    text: str


@dataclass(frozen=True)
class ToolCallStart:
    """Start of a call.

    Attributes
    ----------
    index : int
        Index of the call in its answer, from 0.
    id, name : str
    source : str
        The model's original text up to the arguments, including markers and the white space before
        them.
    """

    index: int
    id: str
    name: str
    source: str = ""


@dataclass(frozen=True)
class ToolCallDelta:
    """Chunk of a call's arguments, a JSON object."""

    index: int
    arguments: str


@dataclass(frozen=True)
class ToolCallEnd:
    """End of a call.

    Attributes
    ----------
    index : int
    is_complete : bool
        Whether the arguments are a complete JSON object; otherwise the text has ended within them,
        or they are damaged.
    is_damaged : bool
        Whether the arguments turned out to be invalid. The text after them is content.
    source : str
        The original text of a damaged call's arguments, in formats where they are not JSON.
    """

    index: int
    is_complete: bool = True
    is_damaged: bool = False
    source: str = ""


Event = TextDelta | ToolCallStart | ToolCallDelta | ToolCallEnd


class ToolParser(Protocol):
    """Incrementally splits one answer into text and calls.

    The concatenated results do not depend on how the text is split into chunks. Takes time linear
    in the length of the text.
    """

    markers: tuple[str, ...]
    """Markers of the format; where they are special tokens, the text must keep those."""

    def feed(self, delta: str) -> list[Event]:
        """Feed text; return the events that later text can no longer change."""

    def finish(self) -> list[Event]:
        """Signal the end of the text; return the events held back so far."""


@dataclass
class ToolCall:
    """Call; `arguments` is JSON text, incomplete if the answer ended within it."""

    id: str
    name: str
    arguments: str


@dataclass
class ParsedText:
    """Complete answer.

    Attributes
    ----------
    content : str
        The text; damaged calls are included verbatim.
    tool_calls : list of ToolCall
    """

    content: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)


def settle(events: Iterable[Event]) -> list[Event]:
    """Return the events of a complete answer, in which damaged calls are text.

    Examples
    --------
    >>> start, delta = ToolCallStart(0, "c0", "add", "<call>"), ToolCallDelta(0, "{")
    >>> settle([start, delta, ToolCallEnd(0, is_complete=False, is_damaged=True)])
    [TextDelta(text='<call>{')]
    """
    found: list[Event] = []
    call: list[Event] = []
    for event in events:
        if isinstance(event, TextDelta):
            found.append(event)
            continue
        call.append(event)
        if isinstance(event, ToolCallEnd):
            found += [TextDelta(_source(call))] if event.is_damaged else call
            call = []
    return found + call


def _source(call: list[Event]) -> str:
    """Return the original text of a damaged call, up to the end of its arguments."""
    start = call[0]
    end = call[-1]
    assert isinstance(start, ToolCallStart) and isinstance(end, ToolCallEnd)
    arguments = (event.arguments for event in call if isinstance(event, ToolCallDelta))
    return start.source + (end.source or "".join(arguments))


def collect(events: Iterable[Event]) -> ParsedText:
    """Join an answer's events.

    Examples
    --------
    >>> collect([ToolCallStart(0, "c0", "add"), ToolCallDelta(0, "{}"), ToolCallEnd(0)])
    ParsedText(content='', tool_calls=[ToolCall(id='c0', name='add', arguments='{}')])
    """
    texts: list[str] = []
    calls: list[ToolCall] = []
    arguments: list[str] = []
    start = ToolCallStart(0, "", "")
    for event in settle(events):
        if isinstance(event, TextDelta):
            texts.append(event.text)
        elif isinstance(event, ToolCallStart):
            start = event
            arguments = []
        elif isinstance(event, ToolCallDelta):
            arguments.append(event.arguments)
        else:
            calls.append(ToolCall(start.id, start.name, "".join(arguments)))
    return ParsedText("".join(texts), calls)


def random_id(prefix: str = "call_", num_chars: int = 24) -> str:
    """Return a new id: the prefix followed by random hexadecimal digits."""
    return prefix + secrets.token_hex((num_chars + 1) // 2)[:num_chars]
