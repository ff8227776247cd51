"""Grammar of calls in a checkpoint's own format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.server.response_template.layout import SPACE, Layout
from engine.server.tool_parsers import Function
from engine.server.tool_parsers.call_grammar import (
    CallGrammar,
    Form,
    Section,
    choice,
    const,
    filled,
    json_arguments,
    sequence,
)
from engine.server.tool_parsers.typed_values import allowed_types
from engine.structured.lark import containing

__all__ = ["declared_calls"]

_LINE: Form = {"type": "optional", "content": const("\n")}
_SPACE: Form = {"type": "regex", "pattern": r"\s{0,4}"}


def declared_calls(layout: Layout, functions: Sequence[Function]) -> CallGrammar:
    """Return the grammar of calls of the functions in a layout."""
    call = choice([_call(layout, one) for one in functions])
    if layout.has_lines:
        call = sequence(_LINE, call, _LINE)
    if not layout.is_list:
        return CallGrammar(Section(layout.begin, call, layout.end, between=""))
    separator = const(", ")
    return CallGrammar(Section(layout.begin, call, f"]{layout.end}", "[", separator))


def _call(layout: Layout, function: Function) -> Form:
    parts = []
    for i, text in enumerate(layout.call.split(SPACE)):
        parts += [_SPACE] if i else []
        parts.append(filled(text, function, _arguments(layout, function)))
    return sequence(*parts)


def _arguments(layout: Layout, function: Function) -> Form:
    """Return the format of a function's arguments; beside values in tags may be a line break."""
    style = layout.style
    if style.kind == "json":
        return json_arguments(function)
    if style.kind == "literals":
        return {
            "type": "literal_values",
            "json_schema": function.schema,
            "begin": style.begin,
            "end": style.end,
            "repeats_others": not function.is_strict,
            "never": layout.end,
        }
    properties = function.parameters.get("properties")
    types = {}
    if not style.reads_json:
        types = {
            name: sorted(allowed_types(schema, function.parameters))
            for name, schema in (properties if isinstance(properties, Mapping) else {}).items()
        }
    values: Form = {
        "type": "tagged_values",
        "json_schema": function.schema,
        "begin": style.begin,
        "end": style.end,
        "close": style.end,
        "types": types,
        "repeats_others": not function.is_strict,
        "excludes": [containing(layout.end)],
        "strips": style.strips,
    }
    return sequence(_LINE, values)
