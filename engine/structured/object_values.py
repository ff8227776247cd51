"""Schemas of objects whose properties are written one by one, each value in a format of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from engine.checks import shown
from engine.structured.lark import escaped
from engine.structured.patterns import whole
from engine.structured.references import SchemaError
from engine.structured.tag_forms import Form

__all__ = [
    "ALL_TYPES",
    "Accepts",
    "json_value",
    "plain_options",
    "properties_of",
    "string_rules",
]

Accepts = Callable[[dict[str, Any], str], bool]
"""Whether a string is valid for a schema of strings; see `json_schema.normalized`."""

ALL_TYPES = ("null", "boolean", "number", "integer", "string", "array", "object")

_MAX_DEPTH = 16  # references and choices in a row


def plain_options(
    schema: Any, definitions: Mapping[str, Any], depth: int = 0
) -> Iterator[Mapping[str, Any]]:
    """Yield the plain cases of a schema that `json_schema.normalized` wrote."""
    if depth > _MAX_DEPTH:
        raise SchemaError("it refers to itself without an object or array between")
    if schema is True or (isinstance(schema, dict) and not schema.keys() - {"$defs"}):
        yield {"type": list(ALL_TYPES)}
    elif isinstance(schema, dict) and "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        yield from plain_options(definitions[name], definitions, depth + 1)
    elif isinstance(schema, dict) and "anyOf" in schema:
        for one in schema["anyOf"]:
            yield from plain_options(one, definitions, depth + 1)
    elif isinstance(schema, dict):
        yield schema


def properties_of(schema: Mapping[str, Any]) -> list[tuple[str, Any, bool]]:
    """Return an object's named properties: name, schema, and whether it is required.

    A property that allows no value is left out.

    Raises
    ------
    SchemaError
        If such a property is required.
    """
    properties = schema.get("properties", {})
    required = schema.get("required", [])
    others = schema.get("additionalProperties", True)
    found = []
    for name in dict.fromkeys([*properties, *required]):
        one = properties.get(name, others)
        if one is not False:
            found.append((name, one, name in required))
        elif name in required:
            raise SchemaError(f"the property {name!r:.80} is required and allows nothing")
    return found


def string_rules(
    schema: Mapping[str, Any],
    accepts: Accepts,
    warnings: list[str],
    can_write: Callable[[str], bool],
) -> list[str]:
    """Return the expressions that a string without quotes must match.

    Parameters
    ----------
    schema : mapping
        Of one string.
    accepts : callable
    warnings : list of str
        Extended by what is not enforced.
    can_write : callable
        Whether a constant can stand where the string is written.

    Raises
    ------
    SchemaError
        If no string matches all of them, or no constant can be written.
    """
    if "enum" in schema:
        rule = {name: value for name, value in schema.items() if name != "enum"}
        kept = [v for v in schema["enum"] if can_write(v) and (len(rule) == 1 or accepts(rule, v))]
        if not kept:
            raise SchemaError(f"no string of the enum {shown(schema['enum'])} can be written here")
        return [f"(?:{'|'.join(map(escaped, kept))})"]
    found = []
    if "minLength" in schema or "maxLength" in schema:
        low = schema.get("minLength", 0)
        high = schema.get("maxLength", "")
        found.append(f"(?s:.{{{low},{high}}})")
    for one in (schema, *schema.get("allOf", ())):
        if "pattern" in one:
            found.append(whole(one["pattern"]))
        if "format" in one:
            warnings.append(f"format {one['format']} is not enforced in text without quotes")
    if len(found) > 1:
        accepts(dict(schema), "")  # raises if they exclude each other
    return found or ["(?s:.*)"]


def json_value(schema: Any, definitions: Mapping[str, Any]) -> Form:
    """Return the format of a value as JSON on one line."""
    document: Form = {} if schema is True else dict(schema)
    if used := _reached(document, definitions):
        document["$defs"] = used
    return {"type": "json_schema", "json_schema": document, "any_whitespace": False}


def _reached(schema: Any, definitions: Mapping[str, Any]) -> dict[str, Any]:
    """Return the definitions that a schema refers to, directly or through others."""
    found: dict[str, Any] = {}
    todo = [schema]
    while todo:
        one = todo.pop()
        if isinstance(one, dict):
            name = str(one["$ref"]).rpartition("/")[2] if isinstance(one.get("$ref"), str) else ""
            if name and name not in found:
                found[name] = definitions[name]
                todo.append(definitions[name])
            todo += [value for key, value in one.items() if key not in ("enum", "const")]
        elif isinstance(one, list):
            todo += one
    return found
