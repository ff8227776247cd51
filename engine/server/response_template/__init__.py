"""Formats of answers that a checkpoint declares itself, in tokenizer_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.checks import warn_once
from engine.errors import ConfigError
from engine.server.response_template.readers import (
    DeclaredReasoning,
    DeclaredTools,
    Parsed,
    answer_reader,
)
from engine.server.response_template.worker import KINDS, check

__all__ = [
    "KINDS",
    "DeclaredReasoning",
    "DeclaredTools",
    "Parsed",
    "answer_reader",
    "chosen",
]

_THOUGHTS = frozenset({"thinking", "reasoning_content", "reasoning"})


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
    return isinstance(fields, Mapping) and not _THOUGHTS.isdisjoint(fields)
