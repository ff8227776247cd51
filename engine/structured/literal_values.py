"""Values in the literals of Gemma's tool calls: ``{key:<|"|>text<|"|>,list:[1,{flag:true}]}``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from engine.structured.lark import escaped
from engine.structured.object_values import (
    ALL_TYPES,
    Accepts,
    json_value,
    plain_options,
    properties_of,
    string_rules,
)
from engine.structured.patterns import whole
from engine.structured.references import SchemaError
from engine.structured.tag_forms import Form, choice, const, repeat, sequence

__all__ = ["literal_values"]

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]{0,255}")
_ANY_NAME = r"[A-Za-z_][A-Za-z0-9_.\-]{0,63}"
_ANY = "any"  # rule of a value without a schema; those of definitions have their names, digits
_MAX_PREFIX = 64  # items of an array with a schema each
_COMMA = const(",")
_NOTHING = const("")


def literal_values(
    schema: Mapping[str, Any],
    fields: Mapping[str, Any],
    accepts: Accepts,
    warnings: list[str],
) -> Form:
    """Return the format of an object as a literal: bare keys, and strings between markers.

    Properties come in the order in which Jinja's ``dictsort`` writes them.

    Parameters
    ----------
    schema : mapping
        Schema of the object, as `json_schema.normalized` returns it.
    fields : mapping
        The format "literal_values": "begin" and "end" around a string (empty for JSON strings),
        "repeats_others" (any number of properties without a name, instead of one), "never" (a text
        that no string has).
    accepts : callable
        See `json_schema.normalized`.
    warnings : list of str
        Extended by what is not enforced.

    Raises
    ------
    SchemaError
        If the schema allows no object, or one that cannot be written.
    """
    writer = _Writer(schema.get("$defs", {}), fields, accepts, warnings)
    max_others = None if fields["repeats_others"] else 1
    found = []
    for one in plain_options(schema, schema.get("$defs", {})):
        if "enum" in one:
            objects = [value for value in one["enum"] if isinstance(value, dict)]
            found += [writer.constants({**one, "enum": objects})] if objects else []
        elif "object" in _types(one):
            found.append(writer.object(one, max_others=max_others))
    if not found:
        raise SchemaError("the arguments of a call must be an object")
    return {"type": "rules", "content": choice(found), "rules": writer.rules()}


class _Writer:
    """Writes schemas as formats, and definitions as rules that formats refer to.

    Parameters
    ----------
    definitions : mapping
    fields, accepts, warnings
        See `literal_values`.
    """

    def __init__(
        self,
        definitions: Mapping[str, Any],
        fields: Mapping[str, Any],
        accepts: Accepts,
        warnings: list[str],
    ) -> None:
        self._definitions = definitions
        self._begin = str(fields["begin"])
        self._end = str(fields["end"])
        self._no_string_has = str(fields["never"])
        self._never = [escaped(fields["never"])] if fields["never"] else []
        self._accepts = accepts
        self._warnings = warnings
        self._rules: dict[str, Form] = {}
        self._todo: list[str] = []

    def rules(self) -> dict[str, Form]:
        """Return the rules that the formats written so far refer to."""
        while self._todo:
            name = self._todo.pop()
            schema = {"type": list(ALL_TYPES)} if name == _ANY else self._definitions[name]
            self._rules[name] = self._value(schema)
        return self._rules

    def _rule(self, name: str) -> Form:
        if name not in self._rules:
            self._rules[name] = _NOTHING  # until `rules` writes it
            self._todo.append(name)
        return {"type": "rule", "name": name}

    def _shared(self, form: Form) -> Form:
        """Return a reference to a format that is written several times."""
        if form.get("value") == "":
            return form
        name = f"shared {len(self._rules)}"
        self._rules[name] = form
        return {"type": "rule", "name": name}

    def _value(self, schema: Any) -> Form:
        """Return the format of a value."""
        if schema is False:
            raise SchemaError("a part of it allows nothing")
        if schema is True or not schema.keys():
            return self._rule(_ANY)
        if "$ref" in schema:
            return self._rule(schema["$ref"].rpartition("/")[2])
        if "anyOf" in schema:
            return choice([self._value(one) for one in schema["anyOf"]])
        if "enum" in schema:
            return self.constants(schema)
        return choice([self._typed(kind, schema) for kind in sorted(_types(schema))])

    def _typed(self, kind: str, schema: Mapping[str, Any]) -> Form:
        if kind == "object":
            return self.object(schema)
        if kind == "array":
            return self._array(schema)
        if kind == "string":
            return self._string(self._rules_of(schema), schema)
        return json_value(schema if schema.get("type") == kind else {"type": kind}, {})

    def constants(self, schema: Mapping[str, Any]) -> Form:
        """Return the format of one of a schema's constants."""
        rules = schema.keys() - {"enum", "type", "additionalProperties"}
        texts = [value for value in schema["enum"] if isinstance(value, str)]
        found = []
        if texts:
            one = {**schema, "type": "string", "enum": texts}
            found.append(self._string(self._rules_of(one), one))
        for value in schema["enum"]:
            if isinstance(value, list | dict) and rules:
                raise SchemaError("a constant with further rules cannot be enforced in literals")
            if not isinstance(value, str):
                found.append(self._constant(value))
        return choice(found)

    def _constant(self, value: Any) -> Form:
        if isinstance(value, str):
            one = {"type": "string", "enum": [value]}
            return self._string(self._rules_of(one), one)
        if isinstance(value, dict):
            items = sorted(value.items(), key=_order)
            return self._group("{}", [sequence(self._key(k), self._constant(v)) for k, v in items])
        if isinstance(value, list):
            return self._group("[]", [self._constant(one) for one in value])
        return const(json.dumps(value))

    def _group(self, brackets: str, parts: Sequence[Form]) -> Form:
        """Return parts in brackets, with commas between them."""
        rest = (part for one in parts[1:] for part in (_COMMA, one))
        return sequence(const(brackets[0]), *parts[:1], *rest, const(brackets[1]))

    # ---- strings and keys

    def _rules_of(self, schema: Mapping[str, Any]) -> list[str]:
        ends = [text for text in (self._end, self._no_string_has) if text]

        def can_write(text: str) -> bool:
            return not any(end in text for end in ends)

        return string_rules(schema, self._accepts, self._warnings, can_write)

    def _string(self, rules: list[str], schema: Mapping[str, Any]) -> Form:
        """Return a string that matches all rules."""
        if not self._end:
            return json_value(schema or {"type": "string"}, {})
        return sequence(const(self._begin), self._text(rules, []))

    def _text(self, rules: list[str], excludes: list[str]) -> Form:
        """Return text up to the marker behind a string."""
        never = {"never": self._never} if self._never else {}
        text: Form = {"type": "any_text", "matches": rules, "excludes": excludes}
        return {**text, "ends": [self._end], **never}

    def _key(self, name: str) -> Form:
        if _NAME.fullmatch(name):
            return const(f"{name}:")
        if len(name) > 256 or (self._end and self._end in name):
            raise SchemaError(f"the property {name!r:.80} cannot be a key of a literal")
        return sequence(self._string([escaped(name)], {"enum": [name]}), const(":"))

    def _other_key(self, rules: list[str], excludes: list[str]) -> Form:
        """Return any key that matches `rules`, and none of `excludes`."""
        bare: Form = {
            "type": "any_text", "matches": [_ANY_NAME, *rules], "excludes": excludes, "ends": []
        }  # fmt: skip
        options = [bare]
        if self._end:
            text = self._text(["(?s:.+)", *rules], excludes)
            options.append(sequence(const(self._begin), text))
        return sequence(choice(options), const(":"))

    # ---- objects and arrays

    def object(self, schema: Mapping[str, Any], max_others: int | None = None) -> Form:
        """Return the format of an object.

        Parameters
        ----------
        schema : mapping
        max_others : int, optional
            Limit of the properties without a name in the schema. With one, they are not written
            beside named ones.
        """
        items = sorted(properties_of(schema), key=_order)
        low, high = self._num_others(schema, items, max_others)
        others = self._others(schema) if high != 0 else None
        if others is None and low:
            raise SchemaError(f"an object must have {low} more properties than it may")
        first = tail = _NOTHING
        if others is not None:
            first = _listed(others, low, high)
            tail = repeat(sequence(_COMMA, others), low, high)
        for name, one, is_required in reversed(items):
            item = sequence(self._key(name), self._value(one))
            tail = self._shared(tail)
            begun = sequence(item, tail)
            first = begun if is_required else choice([begun, first])
            follows = sequence(_COMMA, item)
            tail = sequence(follows if is_required else repeat(follows, 0, 1), tail)
        return sequence(const("{"), first, const("}"))

    def _num_others(
        self, schema: Mapping[str, Any], items: Sequence[tuple[str, Any, bool]], high: int | None
    ) -> tuple[int, int | None]:
        """Return the limits of the number of properties without a name in the schema."""
        if high is not None and items:
            high = 0
        # Where `json_schema.normalized` leaves a limit, no named property is optional.
        low = max(0, schema.get("minProperties", 0) - len(items))
        most = schema.get("maxProperties")
        if most is not None:
            high = most - len(items) if high is None else min(high, most - len(items))
        if high is not None and low > high:
            raise SchemaError(f"an object must have at most {high} further properties, not {low}")
        return low, high

    def _others(self, schema: Mapping[str, Any]) -> Form | None:
        """Return the format of a property without a name in the schema, or None."""
        named = [escaped(name) for name in schema.get("properties", {})]
        patterns = {whole(one): of for one, of in schema.get("patternProperties", {}).items()}
        found = [
            sequence(self._other_key([pattern], named), self._value(one))
            for pattern, one in patterns.items()
            if one is not False
        ]
        rest = schema.get("additionalProperties", True)
        if rest is not False:
            found.append(sequence(self._other_key([], [*named, *patterns]), self._value(rest)))
        return choice(found) if found else None

    def _array(self, schema: Mapping[str, Any]) -> Form:
        prefix = schema.get("prefixItems", [])
        if len(prefix) > _MAX_PREFIX:
            raise SchemaError(f"an array with {len(prefix)} schemas cannot be enforced in literals")
        low = schema.get("minItems", 0)
        high = schema.get("maxItems")
        rest = schema.get("items", True)
        count = len(prefix) if high is None else min(len(prefix), high)
        ended = prefix.index(False) if False in prefix else count
        if ended < count:
            count = ended
            rest = False
        if rest is False:
            high = count if high is None else min(high, count)
        if high is not None and high < low:
            raise SchemaError(f"an array has at most {high} items, and must have {low}")
        tail = _NOTHING
        if high is None or high > count:
            left = None if high is None else high - count
            one = self._value(rest)
            if not count:
                return sequence(const("["), _listed(one, low, left), const("]"))
            tail = _times(sequence(_COMMA, one), max(0, low - count), left)
        for at in range(count - 1, -1, -1):
            comma = _COMMA if at else _NOTHING
            tail = sequence(comma, self._value(prefix[at]), tail)
            tail = tail if at < low else repeat(tail, 0, 1)
        return sequence(const("["), tail, const("]"))


def _listed(one: Form, low: int, high: int | None) -> Form:
    """Return `low` to `high` items with commas between them."""
    if high == 0:
        return _NOTHING
    more = _times(sequence(_COMMA, one), max(0, low - 1), None if high is None else high - 1)
    found = sequence(one, more)
    return found if low else repeat(found, 0, 1)


def _times(one: Form, low: int, high: int | None) -> Form:
    return _NOTHING if high == 0 else repeat(one, low, high)


def _types(schema: Mapping[str, Any]) -> set[str]:
    types = schema.get("type", list(ALL_TYPES))
    return {types} if isinstance(types, str) else set(types)


def _order(item: Sequence[Any]) -> str:
    """Return the key by which ``dictsort`` orders an item: its name, whatever its case."""
    return str(item[0]).lower()
