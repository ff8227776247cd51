"""`RequiredCallsParser`: reads answers that a grammar constrains to calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from engine.server.tool_parsers.events import Event, TextDelta, ToolCallEnd, ToolParser

__all__ = ["RequiredCallsParser", "calls_only"]


class RequiredCallsParser:
    """Reads an answer that is constrained to calls; nothing of it is content.

    If the text ends before a call's arguments, the call is dropped, and a call that is nested too
    deeply ends there, incomplete.

    Parameters
    ----------
    make_parser : callable
        Returns a parser of the format.
    """

    def __init__(self, make_parser: Callable[[], ToolParser]) -> None:
        self._parser = make_parser()
        self.markers = self._parser.markers

    def feed(self, delta: str) -> list[Event]:
        """Feed text; return the events of calls."""
        return calls_only(self._parser.feed(delta))

    def finish(self) -> list[Event]:
        """Signal the end of the text; return the events of calls held back so far."""
        return calls_only(self._parser.finish())


def calls_only(events: Iterable[Event]) -> list[Event]:
    """Return the events of calls; a damaged call is an incomplete one, since text is dropped."""
    return [
        dataclasses.replace(event, is_damaged=False) if isinstance(event, ToolCallEnd) else event
        for event in events
        if not isinstance(event, TextDelta)
    ]
