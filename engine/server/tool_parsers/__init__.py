"""Tool parsers: extract tool calls from generated text, one parser per format.

A parser receives the text of one answer in chunks, and returns text and calls as `Event`s;
`collect` joins them. Arguments are streamed as they arrive. Anything other than a call is text: an
object without a name, a function that the request does not define, invalid JSON. A call whose
arguments end with the text is a call with incomplete arguments. If they turn out to be invalid
after part of them has been streamed, the call ends with `is_damaged=True`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from engine.errors import ConfigError, did_you_mean
from engine.server.tool_parsers._parser import MAX_CALLS
from engine.server.tool_parsers.call_grammar import CallFormat, Function
from engine.server.tool_parsers.events import (
    Event,
    ParsedText,
    TextDelta,
    ToolCall,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    ToolParser,
    collect,
    random_id,
    settle,
)
from engine.server.tool_parsers.formats import FORMATS
from engine.server.tool_parsers.mistral import CallListParser

__all__ = [
    "MAX_CALLS",
    "NAMES",
    "CallFormat",
    "CallListParser",
    "Event",
    "Function",
    "ParsedText",
    "TextDelta",
    "ToolCall",
    "ToolCallDelta",
    "ToolCallEnd",
    "ToolCallStart",
    "ToolParser",
    "calls_of",
    "collect",
    "detect",
    "get",
    "id_maker",
    "random_id",
    "settle",
]

NAMES = tuple(sorted(FORMATS))
"""Names of all tool parsers."""


def get(
    name: str, names: Collection[str] | None = None, *, follows_text: bool = False
) -> ToolParser:
    """Return a new parser for one answer.

    Parameters
    ----------
    name : str
        One of `NAMES`.
    names : collection of str, optional
        Functions defined by the request, preferably a mapping to the JSON schemas of their
        parameters: some formats give values no type. A call to any other function is text. None:
        allow all.
    follows_text : bool
        Whether the answer continues a message with text, so that white space before a first call
        separates texts.

    Raises
    ------
    ConfigError
        If there is no parser of this name; the message suggests the closest one.

    Examples
    --------
    >>> parser = get("hermes")
    >>> events = parser.feed('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    >>> [call.arguments for call in collect(events + parser.finish()).tool_calls]
    ['{"a": 1}']
    """
    if name not in FORMATS:
        hint = did_you_mean(name, NAMES)
        raise ConfigError(f"tool parser must be one of {', '.join(NAMES)}; got {name[:80]!r}{hint}")
    parser = FORMATS[name].parser(names)
    if follows_text:
        parser.follow_text()
    return parser


def calls_of(name: str | None, functions: Sequence[Function]) -> CallFormat | None:
    """Return the grammar of calls of the functions; None if the parser's format has none."""
    form = FORMATS.get(name) if name is not None else None
    return None if form is None or form.calls is None else form.calls(functions)


def id_maker(name: str | None) -> Callable[[], str]:
    """Return a function that makes ids of calls; `name` is the model's parser, if any."""
    return FORMATS[name].make_id if name in FORMATS else random_id


def detect(chat_template: str) -> str | None:
    """Return the name of the parser that fits this chat template, or None.

    Examples
    --------
    >>> detect("... <tool_call>{{ call | tojson }}</tool_call>"), detect("{{ messages }}")
    ('hermes', None)
    """
    fitting = (name for name, one in FORMATS.items() if one.is_used_by(chat_template))
    return next(fitting, None)
