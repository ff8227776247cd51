"""The events of a tool parser, pieces of text and calls, and the answer that they make up."""

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
    """A piece of text outside of calls."""

    text: str


@dataclass(frozen=True)
class ToolCallStart:
    """The start of a call.

    Attributes
    ----------
    index : int
        0 for the first call of an answer.
    id, name : str
    source : str
        The model's original text before the arguments, markers included.
    """

    index: int
    id: str
    name: str
    source: str = ""


@dataclass(frozen=True)
class ToolCallDelta:
    """A piece of a call's arguments, a JSON object."""

    index: int
    arguments: str


@dataclass(frozen=True)
class ToolCallEnd:
    """The end of a call.

    Attributes
    ----------
    index : int
    is_complete : bool
        Whether the arguments are a complete JSON object. Text after an invalid part is content.
    """

    index: int
    is_complete: bool = True


Event = TextDelta | ToolCallStart | ToolCallDelta | ToolCallEnd


class ToolParser(Protocol):
    """Splits the text of one answer into text and calls while it arrives.

    The concatenated results do not depend on how the text is cut into pieces. The time is linear
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
    """A complete call; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


@dataclass
class ParsedText:
    """A complete answer.

    Attributes
    ----------
    content : str
        The text; incomplete calls are included as the model wrote them.
    tool_calls : list of ToolCall
    """

    content: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)


def collect(events: Iterable[Event]) -> ParsedText:
    """Join all events of an answer.

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
    """Return a new id: the prefix, then random hexadecimal digits."""
    return prefix + secrets.token_hex((num_chars + 1) // 2)[:num_chars]
