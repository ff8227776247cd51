"""What a text means where a JSON schema says which types a value may have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from engine.server.tool_parsers.json_scanner import is_json_object

__all__ = ["PYTHON_WORDS", "TEXT", "allowed_types", "typed_json"]

TEXT = frozenset({"string"})
"""The types of a value that is text, whatever it looks like."""

PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
"""Python's constants as JSON."""

_ANY = frozenset({"null", "boolean", "integer", "number", "array", "object", "string"})
_MAX_DEPTH = 16  # nested schemas, and references in a row


def allowed_types(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """Return the JSON types that a schema allows; `root` is the document that "#" refers to.

    Examples
    --------
    >>> sorted(allowed_types({"anyOf": [{"type": "string"}, {"const": None}]}, {}))
    ['null', 'string']
    """
    return _types(schema, root, 0) or _ANY


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> frozenset[str]:
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return frozenset()
    if (reference := schema.get("$ref")) is not None:
        return _types(_referred(reference, root), root, depth + 1)
    if (types := schema.get("type")) is not None:
        given = types if isinstance(types, list) else [types]
        return frozenset(t for t in given if isinstance(t, str) and t in _ANY)
    if isinstance(values := schema.get("enum"), list):
        return frozenset(_type_of(value) for value in values)
    if "const" in schema:
        return frozenset({_type_of(schema["const"])})
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(parts := schema.get(key), list):
            return frozenset().union(*(_types(part, root, depth + 1) for part in parts))
    return frozenset()


def _referred(reference: Any, root: Mapping[str, Any]) -> Any:
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found: Any = root
    for name in reference[1:].split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return kinds.get(type(value), "object")


def typed_json(text: str, types: frozenset[str]) -> str:
    """Return a text as JSON: a value of one of these types other than a string, or else a string.

    Examples
    --------
    >>> typed_json(" 5 ", frozenset({"integer"})), typed_json("5", frozenset({"string"}))
    ('5', '"5"')
    >>> typed_json("[1, 2", frozenset({"array"}))
    '"[1, 2"'
    """
    if types != TEXT:
        bare = text.strip()
        bare = PYTHON_WORDS.get(bare, bare)
        kind = _kind_of(bare)
        if kind in types or (kind == "integer" and "number" in types):
            return bare
    return json.dumps(text, ensure_ascii=False)


def _kind_of(text: str) -> str | None:
    """Return the type of a JSON text; None if it is none, or nested too deeply."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return _type_of(value) if is_json_object(f'{{"": {text}}}') else None
