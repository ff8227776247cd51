"""Values of an object between tags, as Qwen3-Coder's and GLM's tool calls have them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from engine.structured.case import type_of
from engine.structured.lark import escaped
from engine.structured.object_values import (
    ALL_TYPES,
    Accepts,
    json_value,
    plain_options,
    properties_of,
    string_rules,
)
from engine.structured.references import SchemaError
from engine.structured.tag_forms import Form, choice, const, repeat, sequence

__all__ = ["tagged_values"]

_NAME = re.compile(r'[^\s<>"](?:[^<>"\n]*[^\s<>"])?')
_ANY_NAME = r'[^\s<>"]{1,64}'
_MAX_OPTIONS = 4096

# Texts that a reader takes for a value of another type if the schema allows that type too.
_READINGS = {
    "null": r"\s*(?:null|None)\s*",
    "boolean": r"\s*(?:true|false|True|False)\s*",
    "number": r"\s*-?[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?\s*",
    "array": r"\s*\[(?s:.*)\]\s*",
    "object": r"\s*\{(?s:.*)\}\s*",
    "string": r'\s*"(?s:.*)"\s*',
}
# Expressions of the plain types, and the first characters of values that need a JSON grammar.
_PLAIN = {
    "null": "null|None",
    "boolean": "true|false|True|False",
    "integer": r"-?(?:0|[1-9][0-9]{0,17})",
    "number": r"-?(?:0|[1-9][0-9]{0,17})(?:\.[0-9]{1,17})?",
}
_FIRSTS = {"number": "-0-9", "array": r"\[", "object": r"\{"}


def tagged_values(
    schema: Mapping[str, Any], fields: Form, accepts: Accepts, warnings: list[str]
) -> Form:
    """Return the format of the values of an object, each between tags.

    A string is plain text, any other value JSON. Properties without a name in the schema are not
    written, but one if there are no others.

    Parameters
    ----------
    schema : mapping
        Schema of the object, as `json_schema.normalized` returns it.
    fields : mapping
        The format "tagged_values": "begin" (with "{key}") and "end" around a value, "begin_json"
        instead of "begin" before JSON, "close" (what ends a value for the reader), "types" (the
        types that the reader knows for a property), "repeats_others" (any number of properties
        without a name), "excludes" (expressions of texts that are not written), "strips" (whether
        the reader drops white space around a value).
    accepts : callable
        See `json_schema.normalized`.
    warnings : list of str
        Extended by what is not enforced.

    Raises
    ------
    SchemaError
        If the schema allows no object, or one that cannot be written.
    """
    writer = _Writer(schema, fields, accepts, warnings)
    objects = [one for one in writer.options(schema) if "object" in _types(one)]
    if not objects:
        raise SchemaError("the arguments of a call must be an object")
    return choice([writer.object(one) for one in objects])


class _Writer:
    def __init__(
        self, root: Mapping[str, Any], fields: Form, accepts: Accepts, warnings: list[str]
    ) -> None:
        self._definitions = root.get("$defs", {})
        self._fields = fields
        self._accepts = accepts
        self._warnings = warnings

    def options(self, schema: Any) -> Iterator[Mapping[str, Any]]:
        """Yield the plain cases of a schema."""
        return plain_options(schema, self._definitions)

    def object(self, schema: Mapping[str, Any]) -> Form:
        """Return the format of an object's values, in the order of its properties."""
        if not {"minProperties", "maxProperties"}.isdisjoint(schema):
            raise SchemaError("minProperties and maxProperties cannot be enforced between tags")
        if "enum" in schema:
            raise SchemaError("a constant object cannot be enforced between tags")
        parts = []
        for name, one, is_required in properties_of(schema):
            part = _line(self._value(name, one))
            parts.append(part if is_required else repeat(part, 0, 1))
        others = schema.get("additionalProperties", True)
        repeats = self._fields["repeats_others"]
        if others is not False and (repeats or not parts):
            parts.append(repeat(_line(self._other(others)), 0, None if repeats else 1))
        return sequence(*parts)

    def _begin(self, name: str, key: str = "begin") -> str:
        begin = self._fields[key]
        if begin is None:
            begin = self._fields["begin"]
        return str(begin).replace("{key}", name)

    def _value(self, name: str, schema: Any) -> Form:
        """Return a named property between its tags."""
        if not _NAME.fullmatch(name) or len(name) > 256:
            raise SchemaError(f"the property {name!r:.80} cannot be written between tags")
        options = self._readable(name, schema)
        texts = [one for one in options if _types(one) == {"string"}]
        others = [one for one in options if _types(one) != {"string"}]
        end = const(self._fields["end"])
        if self._fields["begin_json"] is not None:
            apart = []
            if texts:
                apart.append(sequence(const(self._begin(name)), self._plain_text(texts, [])))
            if others:
                begin = const(self._begin(name, "begin_json"))
                apart.append(sequence(begin, self._json(others), end))
            return choice(apart)
        if not texts:
            return sequence(const(self._begin(name)), self._json(others), end)
        known = self._types_of(name)
        is_text = known == {"string"}
        found = self._plain_text(texts, []) if is_text else self._mixed(known, texts, others)
        return sequence(const(self._begin(name)), found)

    def _types_of(self, name: str) -> set[str]:
        return set(self._fields["types"].get(name, ALL_TYPES))

    def _readable(self, name: str, schema: Any) -> list[Mapping[str, Any]]:
        """Return a property's cases of one type each that the reader reads as that type."""
        known = self._types_of(name)
        if "number" in known:
            known.add("integer")
        known.add("string")
        found: list[Mapping[str, Any]] = []
        for option in self.options(schema):
            if len(found) > _MAX_OPTIONS:
                raise SchemaError(f"it has more than {_MAX_OPTIONS} alternatives")
            for one in sorted(_types(option) & known):
                if "enum" in option:
                    values = [value for value in option["enum"] if _type(value) == one]
                    found.append({**option, "type": one, "enum": values})
                else:
                    found.append({**option, "type": one})
        if not found:
            raise SchemaError(f"the property {name!r:.80} allows nothing that can be written")
        return found

    def _json(self, options: list[Mapping[str, Any]]) -> Form:
        schema = options[0] if len(options) == 1 else {"anyOf": options}
        return json_value(schema, self._definitions)

    def _mixed(
        self,
        known: set[str],
        texts: list[Mapping[str, Any]],
        others: list[Mapping[str, Any]],
    ) -> Form:
        """Return text beside other types: what looks like one of those is one."""
        free = {one["type"] for one in others if one.keys() == {"type"}}
        is_free = any(one.keys() == {"type"} for one in texts)
        if is_free and free >= known - {"string", *(("integer",) if "number" in free else ())}:
            return self._plain_text(texts, [])
        also: list[str] = []
        firsts = ""
        rest = []
        for one in others:
            kind = one["type"]
            if "enum" in one:
                also += [escaped(json.dumps(value, ensure_ascii=False)) for value in one["enum"]]
            elif one.keys() == {"type"} and kind in _PLAIN:
                also.append(_PLAIN[kind])
            else:
                rest.append(one)
                firsts += _FIRSTS["number" if kind == "integer" else kind]
        kinds = {"number" if kind == "integer" else kind for kind in known}
        excludes = [_READINGS[kind] for kind in sorted({*kinds, "string"})]
        if firsts:
            excludes.append(rf"\s*[{firsts}](?s:.*)")
        found = self._plain_text(texts, excludes) | {"also": also}
        if not rest:
            return found
        return choice([found, sequence(self._json(rest), const(self._fields["end"]))])

    def _plain_text(self, options: list[Mapping[str, Any]], excludes: list[str]) -> Form:
        """Return strings as text up to their closing tag."""
        ends = self._fields["end"], self._fields["close"]
        strips = self._fields["strips"]

        def can_write(text: str) -> bool:
            is_kept = not strips or text == text.strip()
            is_whole = not any(end in text for end in ends)
            return is_kept and is_whole and not any(re.fullmatch(one, text) for one in readings)

        readings = excludes
        excludes = [*excludes, *self._fields["excludes"]]
        found: Form = {"type": "any_text", "excludes": excludes, "ends": [self._fields["end"]]}
        if self._fields["end"] != self._fields["close"]:
            found["never"] = [self._fields["close"]]
        if any(one.keys() == {"type"} for one in options):
            return found
        if strips:  # a rule holds for the text without white space around it
            found["excludes"] = [*excludes, r"\s(?s:.*)", r"(?s:.*)\s"]
        rules = [string_rules(one, self._accepts, self._warnings, can_write) for one in options]
        if len(rules) == 1:
            return found | {"matches": rules[0]}
        if any(len(one) > 1 for one in rules):
            raise SchemaError("alternatives of strings by several rules cannot be enforced")
        return found | {"matches": [f"(?:{'|'.join(one for [one] in rules)})"]}

    def _other(self, schema: Any) -> Form:
        """Return a property without a name in the schema."""
        options = list(self.options(schema))
        if not any("string" in _types(one) and one.keys() == {"type"} for one in options):
            raise SchemaError("properties without a name that are no text cannot be enforced")
        before, _, after = str(self._fields["begin"]).partition("{key}")
        text: Form = {"type": "any_text", "excludes": [], "ends": [self._fields["end"]]}
        name = {"type": "regex", "pattern": _ANY_NAME}
        return sequence(const(before), name, const(after), text)


def _types(schema: Mapping[str, Any]) -> set[str]:
    if "enum" in schema:
        return set(map(_type, schema["enum"]))
    if "const" in schema:
        return {_type(schema["const"])}
    types = schema.get("type", list(ALL_TYPES))
    return {types} if isinstance(types, str) else set(types)


def _type(value: object) -> str:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return "integer" if is_whole else type_of(value)


def _line(content: Form) -> Form:
    """Return a format with an optional line break behind it."""
    return sequence(content, repeat(const("\n"), 0, 1))
