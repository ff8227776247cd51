"""Readers of answers in a checkpoint's own format, which hold the text back until it ends."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from engine.checks import warn_once
from engine.errors import ConfigError
from engine.server.response_template.worker import read
from engine.server.tool_parsers import (
    MAX_CALLS,
    Event,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    random_id,
)
from engine.server.tool_parsers.json_scanner import is_json_object
from engine.server.tool_parsers.typed_values import allowed_types, typed_json

__all__ = ["DeclaredReasoning", "DeclaredTools", "Parsed", "answer_reader", "call_events"]

_MAX_KEPT = 16  # cached results per request, since both readers of an answer parse its text


@dataclass(frozen=True)
class Parsed:
    """An answer: reasoning, content, and calls as pairs of a name and JSON text."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[tuple[str, str], ...] = ()


def answer_reader(
    declared: tuple[str, Mapping[str, Any]], prompt: str, names: Mapping[str, Any]
) -> Callable[[str], Parsed]:
    """Return a function that parses an answer.

    A text that does not fit the format is content, and so is a call of another function.

    Parameters
    ----------
    declared : (str, mapping)
        Kind of the format, and the format.
    prompt : str
        The prompt, or its end.
    names : mapping
        The functions that may be called, and the schemas of their parameters.
    """

    @functools.lru_cache(maxsize=_MAX_KEPT)
    def parse(text: str) -> Parsed:
        try:
            found = read(*declared, tuple(names), prompt, text)
        except ConfigError as error:
            warn_once(f"an answer is not read by the checkpoint's format: {error}")
            return Parsed(content=text)
        calls = found["calls"]
        if len(calls) > MAX_CALLS:
            return Parsed(content=text)
        written = tuple((name, _arguments(given, names[name])) for name, given in calls)
        if not all(is_json_object(arguments) for _, arguments in written):
            return Parsed(content=text)  # nested too deeply
        return Parsed(found["reasoning"], found["content"], written)

    return parse


def _arguments(given: Mapping[str, Any], schema: Any) -> str:
    """Return arguments as JSON; the schema says what a text means."""
    root = schema if isinstance(schema, Mapping) else {}
    properties = root.get("properties")
    parts = []
    for key, value in given.items():
        if isinstance(value, str):
            one = properties.get(key) if isinstance(properties, Mapping) else None
            text = json.dumps(value, ensure_ascii=False)
            text = text if one is None else typed_json(value, allowed_types(one, root))
        else:
            text = json.dumps(value, ensure_ascii=False)
        parts.append(f"{json.dumps(key, ensure_ascii=False)}: {text}")
    return f"{{{', '.join(parts)}}}"


def call_events(index: int, call_id: str, name: str, arguments: str) -> tuple[Event, ...]:
    """Return the events of a whole call."""
    start = ToolCallStart(index, call_id, name)
    return start, ToolCallDelta(index, arguments), ToolCallEnd(index)


class DeclaredReasoning:
    """Splits an answer into reasoning and content at its end; has `ReasoningReader`'s methods.

    Parameters
    ----------
    parse : callable
        Parses a whole answer.
    keeps_calls : bool
        Whether a `DeclaredTools` reads the text: it gets all of it.
    """

    ends_header: str = ""

    def __init__(self, parse: Callable[[str], Parsed], *, keeps_calls: bool) -> None:
        self._parse = parse
        self._keeps_calls = keeps_calls
        self._text: list[str] = []

    @property
    def is_reasoning(self) -> bool:
        """Whether the next text may be reasoning."""
        return True

    def feed(self, delta: str) -> tuple[str, str]:
        """Hold text back."""
        self._text.append(delta)
        return "", ""

    def finish(self) -> tuple[str, str]:
        """Return the reasoning and the content."""
        text = "".join(self._text)
        parsed = self._parse(text)
        return parsed.reasoning, text if self._keeps_calls else parsed.content


class DeclaredTools:
    """Returns an answer's content and calls at its end; has `ToolParser`'s methods."""

    markers: tuple[str, ...] = ()

    def __init__(
        self, parse: Callable[[str], Parsed], make_id: Callable[[], str] = random_id
    ) -> None:
        self._parse = parse
        self._make_id = make_id
        self._text: list[str] = []

    def feed(self, delta: str) -> list[Event]:
        """Hold text back."""
        self._text.append(delta)
        return []

    def finish(self) -> list[Event]:
        """Return the events of the answer."""
        parsed = self._parse("".join(self._text))
        events: list[Event] = [TextDelta(parsed.content)] if parsed.content else []
        for index, (name, arguments) in enumerate(parsed.calls):
            events += call_events(index, self._make_id(), name, arguments)
        return events
