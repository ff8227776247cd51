"""Fields of a request that its protocol does not know: null is dropped, others are errors.

SDKs send new fields before servers know them. A null says nothing, so it is always dropped. Within
`ignore_unknown_fields` (`--ignore-unknown-fields`) other values are dropped too, with a warning.
"""

from __future__ import annotations

import logging
import re
from contextvars import ContextVar
from typing import Any

from engine.checks import shown
from engine.server.protocol.annotations import field_hints, structs_in

__all__ = ["ignore_unknown_fields", "is_dropped", "without_unknown"]

MAX_WARNINGS = 100  # per process: clients choose the names

_log = logging.getLogger("engine.server")
_is_ignoring: ContextVar[bool] = ContextVar("ignore_unknown_fields", default=False)
_warned: set[str] = set()


def ignore_unknown_fields() -> None:
    """Drop the unknown fields of all bodies that the current task decodes from now on."""
    _is_ignoring.set(True)


def is_dropped(where: str, name: str, value: object) -> bool:
    """Whether to drop the unknown field `name` of the object at path `where`.

    The first drop of each field that is not null is logged.
    """
    if value is None:
        return True
    if not _is_ignoring.get():
        return False
    place = re.sub(r"\[\d+\]", "[...]", where)
    text = f"{place or 'the body'} has an unknown field {shown(name)}, which is ignored"
    if text not in _warned and len(_warned) < MAX_WARNINGS:
        _warned.add(text)
        _log.warning("%s", text)
    return True


def without_unknown(value: Any, kind: Any, where: str = "") -> Any:
    """Return a decoded JSON value of type `kind` without the unknown fields that are dropped.

    Parameters
    ----------
    value : object
        May be anything that JSON can hold; it need not fit `kind`.
    kind : type
        Struct type, or an annotation that contains some; at most one of them is an object at each
        level of lists.
    where : str
        Path of the value, for the log.
    """
    structs = list(structs_in(kind))
    if not structs:
        return value
    if isinstance(value, list):
        return [without_unknown(item, kind, f"{where}[...]") for item in value]
    if not isinstance(value, dict):
        return value
    hints = {name: hint for struct in structs for name, hint in field_hints(struct).items()}
    return {
        name: without_unknown(item, hints.get(name), f"{where}.{name}".lstrip("."))
        for name, item in value.items()
        if name in hints or not is_dropped(where, name, item)
    }
