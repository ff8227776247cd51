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
        The model's original text up to the arguments, including markers.
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
        Whether the arguments are a complete JSON object. Text after invalid arguments is content.
    """

    index: int
    is_complete: bool = True


Event = TextDelta | ToolCallStart | ToolCallDelta | ToolCallEnd


class ToolParser(Protocol):
    """Incrementally splits one answer into text and calls.

    The concatenated results do not depend on how the text is split into chunks. Takes time linear
    in the length of the text.
    """

    needs_special_tokens: bool
    """Whether the markers are special tokens, so that `skip_special_tokens` must be False."""

    def feed(self, delta: str) -> list[Event]:
        """Feed text; return the events that later text can no longer change."""

    def finish(self) -> list[Event]:
        """Signal the end of the text; return the events held back so far."""


@dataclass
class ToolCall:
    """Complete call; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


@dataclass
class ParsedText:
    """Complete answer.

    Attributes
    ----------
    content : str
        The text; incomplete calls are included verbatim.
    tool_calls : list of ToolCall
    """

    content: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)


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
    for event in events:
        if isinstance(event, TextDelta):
            texts.append(event.text)
        elif isinstance(event, ToolCallStart):
            start = event
            arguments = []
        elif isinstance(event, ToolCallDelta):
            arguments.append(event.arguments)
        elif event.is_complete:
            calls.append(ToolCall(start.id, start.name, "".join(arguments)))
        else:
            texts.extend((start.source, *arguments))
    return ParsedText("".join(texts), calls)


def random_id(prefix: str = "call_", num_chars: int = 24) -> str:
    """Return a new id: the prefix followed by random hexadecimal digits."""
    return prefix + secrets.token_hex((num_chars + 1) // 2)[:num_chars]
