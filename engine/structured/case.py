"""A case of a JSON schema: allowed types, and a conjunction of constraints by type.

A *conjunction* is a tuple of literals, pairs of a schema and whether it must hold or must fail. The
schemas of properties and items stay conjunctions, so recursive schemas need no end.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from engine.checks import shown
from engine.structured.references import Document, Draft, SchemaError, Subschema

__all__ = [
    "ALL_TYPES",
    "FALSE",
    "Case",
    "Conjunction",
    "Items",
    "Literal",
    "Properties",
    "Seen",
    "merged",
    "needed_items",
    "needed_properties",
    "type_of",
    "value_key",
    "whole_bounds",
]

Literal = tuple[Subschema, bool]
Conjunction = tuple[Literal, ...]

ALL_TYPES = frozenset(("array", "boolean", "null", "number", "object", "string"))

_NOWHERE = Document(False).root
FALSE: Conjunction = ((_NOWHERE, True),)
"""The conjunction that allows nothing."""


class Items:
    """Schemas of an array's items: those of the first items, and that of the others."""

    __slots__ = ("prefix", "rest")

    def __init__(self, prefix: Sequence[Conjunction] = (), rest: Conjunction = ()) -> None:
        self.prefix = tuple(prefix)
        self.rest = rest

    def at(self, index: int) -> Conjunction:
        return self.prefix[index] if index < len(self.prefix) else self.rest

    def merged(self, other: Items) -> Items:
        count = max(len(self.prefix), len(other.prefix))
        prefix = [_both(self.at(i), other.at(i)) for i in range(count)]
        return Items(prefix, _both(self.rest, other.rest))


class Properties:
    """Schemas of an object's properties, by name and by pattern, and that of the others."""

    __slots__ = ("names", "others", "patterns")

    def __init__(
        self,
        names: dict[str, Conjunction] | None = None,
        patterns: dict[str, Conjunction] | None = None,
        others: Conjunction = (),
    ) -> None:
        self.names = names or {}
        self.patterns = patterns or {}
        self.others = others

    def merged(self, other: Properties, matches: Callable[[str, str], bool]) -> Properties:
        """Return both; raise SchemaError if names and patterns overlap in an inexpressible way."""
        names: dict[str, Conjunction] = {}
        for name, one in self.names.items():
            names[name] = _both(one, other._without_patterns(name, matches))
        for name, one in other.names.items():
            if name not in names:
                names[name] = _both(self._without_patterns(name, matches), one)
        patterns: dict[str, Conjunction] = {}
        for mine, yours in ((self, other), (other, self)):
            for pattern, one in mine.patterns.items():
                if pattern in yours.patterns:
                    patterns.setdefault(pattern, _both(one, yours.patterns[pattern]))
                    continue
                patterns[pattern] = _both(one, yours.others)
                if yours.others and any(matches(pattern, name) for name in yours.names):
                    raise SchemaError(
                        f"patternProperties {shown(pattern)} matches a property of a subschema "
                        "with additionalProperties; together they cannot be enforced"
                    )
        return Properties(names, patterns, _both(self.others, other.others))

    def _without_patterns(self, name: str, matches: Callable[[str, str], bool]) -> Conjunction:
        """Return the schema of a property, apart from patterns, which stay patterns."""
        if name in self.names:
            return self.names[name]
        is_matched = self.others and any(matches(pattern, name) for pattern in self.patterns)
        return () if is_matched else self.others


class Seen:
    """Properties and items that a case has evaluated, for the `unevaluated` keywords."""

    __slots__ = ("by_contains", "items", "names", "patterns")

    def __init__(
        self,
        names: Iterable[str] = (),
        patterns: Iterable[str] = (),
        items: float = 0,
        by_contains: bool = False,
    ) -> None:
        self.names = frozenset(names)
        self.patterns = frozenset(patterns)  # "" stands for all properties
        self.items = items  # number of first items; inf: all
        self.by_contains = by_contains  # and also those that a `contains` matches

    def merged(self, other: Seen) -> Seen:
        return Seen(
            self.names | other.names,
            self.patterns | other.patterns,
            max(self.items, other.items),
            self.by_contains or other.by_contains,
        )


class Case:
    """A conjunction of constraints: the allowed types, and constraints by type.

    Attributes
    ----------
    types : frozenset of str
    facts : dict
        By name: `values` (allowed constants), `excluded` (forbidden ones), `is_integer`,
        `is_fraction`, `low` (bound, whether it is excluded), `high` (bound, whether it is
        included), `multiples`, `min_length`, `max_length`, `patterns`, `formats`, `min_items`,
        `max_items`, `items`, `properties`, `required`, `min_properties`, `max_properties`,
        `names` (conjunction for property names), `refused` (pairs of a type and a reason), `seen`.
    """

    __slots__ = ("facts", "types")

    def __init__(self, types: Iterable[str] = ALL_TYPES, **facts: Any) -> None:
        self.types = frozenset(types)
        self.facts = facts

    def limited(self, name: str, count: int) -> Case:
        return Case(self.types, **{**self.facts, name: count})

    def without(self, name: str) -> Case:
        return Case(self.types, **{key: fact for key, fact in self.facts.items() if key != name})


def _both(one: Conjunction, other: Conjunction) -> Conjunction:
    if not one or not other:
        return one or other
    return tuple(dict.fromkeys(one + other))


def _same_values(one: tuple[Any, ...], other: tuple[Any, ...]) -> tuple[Any, ...]:
    keys = {value_key(value) for value in other}
    return tuple(value for value in one if value_key(value) in keys)


def _union(one: tuple[Any, ...], other: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(one + other))


_MERGE: dict[str, Callable[[Any, Any], Any]] = {
    **dict.fromkeys(("low", "min_length", "min_items", "min_properties"), max),
    **dict.fromkeys(("high", "max_length", "max_items", "max_properties"), min),
    **dict.fromkeys(("excluded", "multiples", "patterns", "formats", "required"), _union),
    **dict.fromkeys(("refused",), _union),
    **dict.fromkeys(("is_integer", "is_fraction"), lambda one, other: one or other),
    "values": _same_values,
    "items": Items.merged,
    "names": _both,
    "seen": Seen.merged,
}


def value_key(value: object) -> str:
    """Return a text that is equal for equal JSON values: 1 and 1.0 are, 1 and true are not."""
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: object) -> object:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return value


def type_of(value: object) -> str:
    """Return the JSON type of a value; "number" for whole numbers too."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def merged(one: Case, other: Case, matches: Callable[[str, str], bool]) -> Case:
    """Return the case that both hold, without the types that this leaves no value of.

    Parameters
    ----------
    matches : callable
        Whether a pattern (first argument) matches a property name.

    Raises
    ------
    SchemaError
        If names and patterns of properties overlap in an inexpressible way.
    """
    types = one.types & other.types
    if not one.facts and not other.facts:
        return Case(types)
    facts = dict(one.facts)
    for name, fact in other.facts.items():
        if name not in facts:
            facts[name] = fact
        elif name == "properties":
            facts[name] = facts[name].merged(fact, matches)
        else:
            facts[name] = _MERGE[name](facts[name], fact)
    return _trimmed(types, facts)


def _trimmed(types: frozenset[str], facts: dict[str, Any]) -> Case:
    """Return a case without the types, and the constants, that contradict its constraints."""
    gone = set()
    excluded = facts.get("excluded", ())
    if "null" in excluded:
        gone.add("null")
    if "true" in excluded and "false" in excluded:
        gone.add("boolean")
    low = facts.get("low")
    high = facts.get("high")
    if low and high and (low[0] > high[0] or (low[0] == high[0] and (low[1] or not high[1]))):
        gone.add("number")
    if facts.get("is_integer"):
        bottom, top = whole_bounds(low or (-math.inf, True), high or (math.inf, False))
        if bottom > top or facts.get("is_fraction"):
            gone.add("number")
    for kind, what in (("string", "length"), ("array", "items"), ("object", "properties")):
        least = facts.get(f"min_{what}", 0)
        least = max(least, len(facts.get("required", ()))) if kind == "object" else least
        if least > facts.get(f"max_{what}", math.inf):
            gone.add(kind)
    if any(map(_is_contradiction, needed_properties(facts))):
        gone.add("object")
    if any(map(_is_contradiction, needed_items(facts))):
        gone.add("array")
    types = types - gone
    if "values" in facts:
        values = [
            value
            for value in facts["values"]
            if type_of(value) in types
            and value_key(value) not in excluded
            and (type_of(value) != "number" or _is_in_range(value, facts))
        ]
        facts = facts | {"values": tuple(values)}
        facts.pop("excluded", None)
        types = frozenset(map(type_of, values))
    return Case(types, **facts)


def whole_bounds(low: tuple[Any, bool], high: tuple[Any, bool]) -> tuple[Any, Any]:
    """Return the least and the greatest integer of a range, infinite where it is open.

    Parameters
    ----------
    low, high : tuple
        Bound, and whether it is excluded (`low`) or included (`high`).

    Examples
    --------
    >>> whole_bounds((0.5, False), (3, False)), whole_bounds((1, True), (math.inf, False))
    ((1, 2), (2, inf))
    """
    bottom = low[0]
    top = high[0]
    if bottom > -math.inf:
        bottom = math.floor(bottom) + 1 if low[1] else math.ceil(bottom)
    if top < math.inf:
        top = math.floor(top) if high[1] else math.ceil(top) - 1
    return bottom, top


def _is_in_range(value: float, facts: dict[str, Any]) -> bool:
    if facts.get("is_integer") and value != int(value):
        return False
    if facts.get("is_fraction") and value == int(value):
        return False
    low, is_above = facts.get("low", (-math.inf, False))
    high, is_at_most = facts.get("high", (math.inf, True))
    is_high_enough: bool = value > low if is_above else value >= low
    is_low_enough: bool = value <= high if is_at_most else value < high
    return is_high_enough and is_low_enough


def _is_contradiction(conjunction: Conjunction) -> bool:
    """Return whether a conjunction allows nothing by its constants alone.

    So a chain of `if` by one property, each with a constant, has one case each, not all subsets.
    """
    if FALSE[0] in conjunction:
        return True
    if len(conjunction) < 2:
        return False
    allowed: set[str] | None = None
    excluded: set[str] = set()
    for schema, wanted in conjunction:
        keys = _constants(schema)
        if wanted and keys is not None:
            allowed = keys if allowed is None else allowed & keys
        elif not wanted and keys is not None and len(schema.value) == 1:
            excluded |= keys
    return allowed is not None and allowed <= excluded


def _constants(schema: Subschema) -> set[str] | None:
    """Return the keys of a schema's constants, or None if it does not list them."""
    if not isinstance(schema.value, dict) or "$ref" in schema.value:
        return None
    if isinstance(values := schema.value.get("enum"), list):
        return set(map(value_key, values))
    if "const" in schema.value and schema.draft >= Draft.DRAFT_6:
        return {value_key(schema.value["const"])}
    return None


def needed_items(facts: dict[str, Any]) -> list[Conjunction]:
    """Return the conjunctions that an array's required items must satisfy."""
    items = facts.get("items")
    count = min(facts.get("min_items", 0), 64)
    return [] if items is None else [items.at(i) for i in range(count)]


def needed_properties(facts: dict[str, Any]) -> list[Conjunction]:
    """Return the conjunctions that an object's required properties must satisfy."""
    properties = facts.get("properties")
    if properties is None:
        return []
    others = () if properties.patterns else properties.others
    return [properties.names.get(name, others) for name in facts.get("required", ())]
