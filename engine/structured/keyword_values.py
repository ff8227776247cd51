"""Values of an object as keyword arguments: ``key=value, key=value``, each value JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from engine.structured.object_values import json_value, plain_options, properties_of
from engine.structured.references import SchemaError
from engine.structured.tag_forms import Form, choice, const, repeat, sequence

__all__ = ["keyword_values"]

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
        one = sequence(_ANY_NAME, const("="), json_value({}, {}))
        content = {"type": "list", "content": one, "separator": const(", "), "max": 1024}
        return repeat(content, 0, 1)
    definitions = schema.get("$defs", {})
    writer = _Writer(definitions)
    options = [one for one in plain_options(schema, definitions) if one.get("type") == "object"]
    if not options:
        raise SchemaError("the arguments of a call must be an object")
    return choice([writer.object(one) for one in options])


class _Writer:
    def __init__(self, definitions: Mapping[str, Any]) -> None:
        self._definitions = definitions
        self._num_items = 0

    def object(self, schema: Mapping[str, Any]) -> Form:
        """Return the format of an object's values."""
        if not {"minProperties", "maxProperties", "enum"}.isdisjoint(schema):
            raise SchemaError("numbers of properties cannot be enforced in keyword arguments")
        items = properties_of(schema)
        for name, _, _ in items:
            if not _NAME.fullmatch(name):
                raise SchemaError(f"the property {name!r:.80} cannot be a keyword argument")
        firsts = next((i + 1 for i, one in enumerate(items) if one[2]), len(items))
        found = [self._from(items, i) for i in range(firsts)]
        if not any(is_required for _, _, is_required in items):
            found.append(const(""))
        return choice(found)

    def _from(self, items: list[tuple[str, Any, bool]], at: int) -> Form:
        """Return the format of the items if item `at` is the first one written."""
        self._num_items += len(items) - at
        if self._num_items > _MAX_ITEMS:
            raise SchemaError(f"it needs more than {_MAX_ITEMS} keyword arguments")
        name, schema, _ = items[at]
        parts = [self._item(f"{name}=", schema)]
        for name, schema, is_required in items[at + 1 :]:
            item = self._item(f", {name}=", schema)
            parts.append(item if is_required else repeat(item, 0, 1))
        return sequence(*parts)

    def _item(self, begin: str, schema: Any) -> Form:
        return sequence(const(begin), json_value(schema, self._definitions))
