"""What the annotations of a request's structs allow: fields, and fixed sets of values."""

from __future__ import annotations

import functools
import re
import typing
from collections.abc import Collection, Iterator
from typing import Any, Literal

import msgspec

__all__ = [
    "field_hints",
    "field_names",
    "hints_at",
    "invalid",
    "one_of",
    "structs_in",
    "wrong_choice",
]

_STEP = re.compile(r"\.([A-Za-z_]\w*)|\[[^\]]*\]")
_CHOICE = re.compile(r"Invalid enum value ('.*')$", re.DOTALL)


def structs_in(hint: Any) -> Iterator[type[msgspec.Struct]]:
    """Yield the struct types in an annotation such as ``list[Tool] | None``."""
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        yield hint
    for inner in typing.get_args(hint):
        yield from structs_in(inner)


def _literals_in(hint: Any) -> Iterator[Any]:
    """Yield the values of the `Literal`s in an annotation such as ``Literal["a", "b"] | None``."""
    inner = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        yield from inner
        return
    for one in inner:
        yield from _literals_in(one)


def field_names(struct: type[msgspec.Struct]) -> list[str]:
    """Return the names of a struct's fields in JSON, with the tag's if it has one."""
    names = [field.encode_name for field in msgspec.structs.fields(struct)]
    tag = struct.__struct_config__.tag_field
    return [*names, tag] if tag else names


@functools.cache
def field_hints(struct: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the annotation of each field by its name in JSON; None for the tag's."""
    hints = typing.get_type_hints(struct)
    found = {f.encode_name: hints[f.name] for f in msgspec.structs.fields(struct)}
    return dict.fromkeys(field_names(struct)) | found


def hints_at(kind: Any, path: str) -> list[Any]:
    """Return the annotations of the value at a path such as ``.messages[0].content``."""
    found = [kind]
    for step in _STEP.finditer(path):
        if step[1] is not None:  # not an index: lists are unwrapped by those who read the hints
            structs = [struct for hint in found for struct in structs_in(hint)]
            found = [field_hints(struct).get(step[1]) for struct in structs]
    return found


def invalid(reason: str) -> str:
    """Return the end of a message about a value that msgspec refuses for this reason.

    Examples
    --------
    >>> invalid("Expected `int`, got `str`")
    'must be valid: expected `int`, got `str`'
    """
    return f"must be valid: {reason[:1].lower()}{reason[1:]}"


def wrong_choice(reason: str, kind: Any, path: str) -> str:
    """Return the end of a message about a value that is none of a fixed set; "" if it is no such.

    Parameters
    ----------
    reason : str
        msgspec's, without the path.
    kind : type
        What was decoded.
    path : str
        Of the value in it: ".messages[0].role".

    Examples
    --------
    >>> wrong_choice("Invalid enum value 'c'", list[Literal["a", "b"]], "[0]")
    "must be one of 'a', 'b'; got 'c'"
    >>> wrong_choice("Invalid enum value 'c'", Literal["a"], "")
    "must be 'a'; got 'c'"
    """
    if (given := _CHOICE.match(reason)) is None:
        return ""
    choices = [repr(choice) for hint in hints_at(kind, path) for choice in _literals_in(hint)]
    return f"must be {one_of(choices)}; got {given[1][:80]}"


def one_of(choices: Collection[str]) -> str:
    """Return "one of a, b" for an error; of a single choice, the choice."""
    return f"{'one of ' if len(choices) > 1 else ''}{', '.join(choices)}"
