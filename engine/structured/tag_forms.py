"""Builders of a structural tag's formats, as a request gives them and as they are reduced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["Form", "choice", "const", "repeat", "sequence"]

Form = dict[str, Any]
"""A format: its "type" and fields; see `engine.structured.structural_tag`."""


def const(value: str) -> Form:
    """Return the format of a literal text, in which special tokens are tokens."""
    return {"type": "const_string", "value": value}


def sequence(*elements: Form) -> Form:
    """Return the format of elements in a row; empty literals are left out."""
    kept = [one for one in elements if one.get("value") != ""] or [const("")]
    return kept[0] if len(kept) == 1 else {"type": "sequence", "elements": kept}


def choice(elements: Sequence[Form]) -> Form:
    """Return the format of one of the elements."""
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": list(elements)}


def repeat(content: Form, low: int, high: int | None) -> Form:
    """Return the format of `low` to `high` repetitions; in a request, `high` is not None."""
    return {"type": "repeat", "content": content, "min": low, "max": high}
