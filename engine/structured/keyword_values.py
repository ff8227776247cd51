"""Values of an object as keyword arguments: ``key=value, key=value``, each value JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from engine.structured.references import SchemaError
from engine.structured.tagged_values import plain_options, reached_definitions

__all__ = ["keyword_values"]

Form = dict[str, Any]

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,255}")
_ANY_NAME: Form = {"type": "regex", "pattern": "[A-Za-z_][A-Za-z0-9_]{0,63}"}
_MAX_ITEMS = 4096  # values of all alternatives


def keyword_values(schema: Mapping[str, Any], *, repeats_others: bool) -> Form:
    """Return the format of the values of an object as keyword arguments.

    Properties come in the order of the schema; those without a name in it are not written.

    Parameters
    ----------
    schema : mapping
        Schema of the object, as `json_schema.normalized` returns it.
    repeats_others : bool
        Whether any property may be written, instead of the schema's.

    Raises
    ------
    SchemaError
        If the schema allows no object, or one that cannot be written.
    """
    if repeats_others:
        value = {"type": "json_schema", "json_schema": {}, "any_whitespace": False}
        one = _sequence(_ANY_NAME, _const("="), value)
        content = {"type": "list", "content": one, "separator": _const(", "), "max": 1024}
        return _optional(content)
    writer = _Writer(schema.get("$defs", {}))
    options = [one for one in plain_options(schema) if one.get("type") == "object"]
    found = [writer.object(one) for one in options]
    if not found:
        raise SchemaError("the arguments of a call must be an object")
    return found[0] if len(found) == 1 else {"type": "or", "elements": found}


class _Writer:
    def __init__(self, definitions: Mapping[str, Any]) -> None:
        self._definitions = definitions
        self._num_items = 0

    def object(self, schema: Mapping[str, Any]) -> Form:
        """Return the format of an object's values."""
        if not {"minProperties", "maxProperties", "enum"}.isdisjoint(schema):
            raise SchemaError("numbers of properties cannot be enforced in keyword arguments")
        properties = schema.get("properties", {})
        required = schema.get("required", [])
        others = schema.get("additionalProperties", True)
        items = []
        for name in dict.fromkeys([*properties, *required]):
            one = properties.get(name, others)
            if one is False and name in required:
                raise SchemaError(f"the property {name!r:.80} is required and allows nothing")
            if not _NAME.fullmatch(name):
                raise SchemaError(f"the property {name!r:.80} cannot be a keyword argument")
            if one is not False:
                items.append((name, one, name in required))
        firsts = next((i + 1 for i, one in enumerate(items) if one[2]), len(items))
        found = [self._from(items, i) for i in range(firsts)]
        if not any(is_required for _, _, is_required in items):
            found.append(_sequence())
        return found[0] if len(found) == 1 else {"type": "or", "elements": found}

    def _from(self, items: list[tuple[str, Any, bool]], at: int) -> Form:
        """Return the format of the items of which the first that is written is `at`."""
        self._num_items += len(items) - at
        if self._num_items > _MAX_ITEMS:
            raise SchemaError(f"it needs more than {_MAX_ITEMS} keyword arguments")
        parts = [self._item(*items[at][:2], is_first=True)]
        for name, schema, is_required in items[at + 1 :]:
            item = self._item(name, schema, is_first=False)
            parts.append(item if is_required else _optional(item))
        return _sequence(*parts)

    def _item(self, name: str, schema: Any, *, is_first: bool) -> Form:
        value: Form = {} if schema is True else dict(schema)
        if used := reached_definitions(value, self._definitions):
            value["$defs"] = used
        form = {"type": "json_schema", "json_schema": value, "any_whitespace": False}
        return _sequence(_const(f"{name}=" if is_first else f", {name}="), form)


def _const(value: str) -> Form:
    return {"type": "const_string", "value": value}


def _sequence(*elements: Form) -> Form:
    return {"type": "sequence", "elements": list(elements)}


def _optional(content: Form) -> Form:
    return {"type": "repeat", "content": content, "min": 0, "max": 1}
