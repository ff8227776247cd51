"""Formats of answers that a checkpoint declares itself, in tokenizer_config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from engine.checks import warn_once
from engine.errors import ConfigError
from engine.server.answer_forms import AnswerForms, BlockForms, Opening, PlainForms
from engine.server.reasoning import Block, ReasoningReader
from engine.server.response_template import worker
from engine.server.response_template.calls import declared_calls
from engine.server.response_template.readers import (
    DeclaredReasoning,
    DeclaredTools,
    answer_reader,
)
from engine.server.response_template.streams import (
    Regions,
    StreamedReasoning,
    StreamedTools,
    texts_of,
)
from engine.server.response_template.worker import KINDS, THOUGHTS, check
from engine.server.tool_parsers import CallFormat, Function, ToolParser, random_id

__all__ = ["DeclaredReaders", "chosen"]

_MAX_PROMPT_CHARS = 200_000  # end of the prompt that is searched for the beginning of the message


def chosen(
    declared: tuple[str, Mapping[str, Any]] | None,
    tool_parser: str | None,
    reasoning_parser: str | None,
) -> tuple[str, Mapping[str, Any]] | None:
    """Return the format that a checkpoint declares, if its answers are to be read by it.

    They are if the chat template has no known format of calls, or none of reasoning although the
    declared one has. A format that cannot be used is logged.

    Parameters
    ----------
    declared : (str, mapping) or None
        Kind of the format, and the format.
    tool_parser, reasoning_parser : str or None
        The formats that the chat template has.
    """
    if declared is None:
        return None
    if tool_parser is not None and (reasoning_parser is not None or not _has_thoughts(*declared)):
        return None
    try:
        check(*declared)
    except ConfigError as error:
        warn_once(f"the checkpoint's format of answers is not used: {error}")
        return None
    return declared


def _has_thoughts(kind: str, spec: Mapping[str, Any]) -> bool:
    fields = spec.get("fields" if kind == KINDS[0] else "properties")
    return isinstance(fields, Mapping) and not fields.keys().isdisjoint(THOUGHTS)


class DeclaredReaders:
    """Makes readers of the answers to one request in a checkpoint's own format.

    They stream if the format is a template whose delimiters are texts; otherwise, they hold an
    answer back until it ends.

    Parameters
    ----------
    declared : (str, mapping)
        Kind of the format, and the format.
    prompt : str
    names : mapping
        The functions that may be called, and the schemas of their parameters.
    """

    def __init__(
        self, declared: tuple[str, Mapping[str, Any]], prompt: str, names: Mapping[str, Any]
    ) -> None:
        self._declared = declared
        self._end = prompt[-_MAX_PROMPT_CHARS:]
        self._regions = Regions.of(*declared)
        begun = self._end if self._regions is None else ""
        self._parse = answer_reader(declared, begun, names)

    def calls(self, functions: Sequence[Function]) -> CallFormat | None:
        """Return the grammar of calls of the functions; None if none is known for the format."""
        if self._has_hidden_thoughts:
            return None  # it is not known whether the answer begins inside them
        keys = {}
        for function in functions:
            properties = function.parameters.get("properties")
            keys[function.name] = list(properties) if isinstance(properties, Mapping) else []
        try:
            found = worker.layout(*self._declared, keys)
        except ConfigError as error:
            warn_once(f"calls in the checkpoint's format have no grammar: {error}")
            return None
        return None if found is None else declared_calls(found, functions)

    @property
    def forms(self) -> AnswerForms:
        """Formats of whole answers."""
        return PlainForms() if self._block is None else BlockForms(self._block)

    @property
    def opening(self) -> Opening:
        """State of the reasoning at the end of the prompt."""
        is_open = False if self._block is None else self._block.is_open_at_end(self._end)
        return "may open" if is_open is None else "open" if is_open else "closed"

    @cached_property
    def _thoughts(self) -> list[Mapping[str, Any]]:
        """Fields of the reasoning that have delimiters."""
        kind, spec = self._declared
        fields = spec["fields"] if kind == KINDS[0] else {}
        return [fields[name] for name in THOUGHTS if name in fields]

    @property
    def _has_hidden_thoughts(self) -> bool:
        return bool(self._thoughts) and self._block is None

    @cached_property
    def _block(self) -> Block | None:
        """Markers of the reasoning, if they are texts."""
        if len(self._thoughts) != 1:
            return None
        opening, closing = (texts_of(self._thoughts[0].get(key)) for key in ("open", "close"))
        return Block(opening, closing, ()) if opening and closing else None

    def reasoning(self, keeps_calls: bool) -> ReasoningReader:
        """Return a reader of one answer; `keeps_calls` if one of `tools` reads its content."""
        if self._regions is None:
            return DeclaredReasoning(self._parse, keeps_calls=keeps_calls)
        return StreamedReasoning(self._regions, self._end, self._parse, keeps_calls=keeps_calls)

    def tools(self, make_id: Callable[[], str] = random_id) -> ToolParser:
        """Return a parser of the calls of one answer."""
        if self._regions is None:
            return DeclaredTools(self._parse, make_id)
        return StreamedTools(self._regions, self._begun, self._parse, make_id)

    @cached_property
    def _begun(self) -> str:
        """Content of the message that the prompt has begun."""
        assert self._regions is not None
        return StreamedReasoning(self._regions, self._end, self._parse, keeps_calls=True).begun
