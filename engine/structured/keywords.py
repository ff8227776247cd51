"""The keywords of JSON Schema: since which draft they exist, and which values they may have."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from engine.structured.case import ALL_TYPES
from engine.structured.references import Draft

__all__ = ["ANNOTATIONS", "CHECKS", "COUNTS", "GROUPS", "SINCE", "UNCHECKED"]

ANNOTATIONS = frozenset(
    [
        "$anchor",
        "$comment",
        "$defs",
        "$dynamicAnchor",
        "$id",
        "$recursiveAnchor",
        "$schema",
        "$vocabulary",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
        "default",
        "definitions",
        "deprecated",
        "description",
        "discriminator",
        "example",
        "examples",
        "externalDocs",
        "id",
        "nullable",
        "readOnly",
        "title",
        "writeOnly",
        "xml",
    ]
)
UNCHECKED = frozenset(("nullable", "x-guidance"))  # annotations that look like constraints
SINCE = {
    **dict.fromkeys(("const", "contains", "propertyNames"), Draft.DRAFT_6),
    **dict.fromkeys(("if", "then", "else"), Draft.DRAFT_7),
    **dict.fromkeys(
        [
            "$recursiveRef",
            "dependentRequired",
            "dependentSchemas",
            "maxContains",
            "minContains",
            "unevaluatedItems",
            "unevaluatedProperties",
        ],
        Draft.DRAFT_2019,
    ),
    **dict.fromkeys(("$dynamicRef", "prefixItems"), Draft.DRAFT_2020),
}


def _is_schema(value: object) -> bool:
    return isinstance(value, dict | bool)


def _is_schema_map(value: object) -> bool:
    return isinstance(value, dict) and all(map(_is_schema, value.values()))


def _is_schema_list(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_schema, value))


def _is_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_count(value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and value >= 0 and value == value // 1 and value < 1 << 53  # type: ignore


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf


def _is_type(value: object) -> bool:
    names = [value] if isinstance(value, str) else value if isinstance(value, list) else []
    return bool(names) and all(name in {*ALL_TYPES, "integer"} for name in names)


COUNTS = {
    "minLength": ("min_length", "string", True),
    "maxLength": ("max_length", "string", False),
    "minItems": ("min_items", "array", True),
    "maxItems": ("max_items", "array", False),
    "minProperties": ("min_properties", "object", True),
    "maxProperties": ("max_properties", "object", False),
}
_Check = tuple[Callable[[Any], bool], str]
_SCHEMA: _Check = (_is_schema, "a schema, an object or a boolean")
_SCHEMAS: _Check = (_is_schema_list, "a list of schemas")
_NUMBER: _Check = (_is_finite, "a number")
CHECKS: dict[str, _Check] = {
    **dict.fromkeys(("$ref", "$dynamicRef", "$recursiveRef"), (lambda v: True, "a reference")),
    **dict.fromkeys(("allOf", "anyOf", "oneOf"), _SCHEMAS),
    "prefixItems": (lambda v: isinstance(v, list) and all(map(_is_schema, v)), _SCHEMAS[1]),
    "items": (
        lambda v: _is_schema(v) or (isinstance(v, list) and all(map(_is_schema, v))),
        "a schema or a list of schemas",
    ),
    **dict.fromkeys(
        [
            "not",
            "if",
            "then",
            "else",
            "contains",
            "propertyNames",
            "additionalProperties",
            "additionalItems",
            "unevaluatedItems",
            "unevaluatedProperties",
        ],
        _SCHEMA,
    ),
    **dict.fromkeys(
        ("properties", "patternProperties", "dependentSchemas"),
        (_is_schema_map, "an object of schemas"),
    ),
    "dependentRequired": (
        lambda v: isinstance(v, dict) and all(map(_is_names, v.values())),
        "an object of lists of names",
    ),
    "dependencies": (
        lambda v: isinstance(v, dict) and all(_is_schema(x) or _is_names(x) for x in v.values()),
        "an object of schemas and lists of names",
    ),
    "required": (_is_names, "a list of names"),
    "type": (_is_type, "one or more of array, boolean, integer, null, number, object, string"),
    "enum": (lambda v: isinstance(v, list), "a list"),
    "const": (lambda v: True, "a value"),
    **dict.fromkeys(("minimum", "maximum"), _NUMBER),
    **dict.fromkeys(
        ("exclusiveMinimum", "exclusiveMaximum"),
        (lambda v: isinstance(v, bool) or _is_finite(v), "a number"),
    ),
    "multipleOf": (lambda v: _is_finite(v) and v != 0, "a number other than 0"),
    **dict.fromkeys((*COUNTS, "minContains", "maxContains"), (_is_count, "a whole number")),
    **dict.fromkeys(("pattern", "format"), (lambda v: isinstance(v, str), "a string")),
    "uniqueItems": (lambda v: isinstance(v, bool), "true or false"),
}
GROUPS = {
    **dict.fromkeys(("patternProperties", "additionalProperties"), "properties"),
    **dict.fromkeys(("prefixItems", "additionalItems"), "items"),
    **dict.fromkeys(("then", "else"), "if"),
    **dict.fromkeys(("minContains", "maxContains"), "contains"),
    **dict.fromkeys(("dependentRequired", "dependentSchemas"), "dependencies"),
}
