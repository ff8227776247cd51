"""Rewrites a JSON schema as a choice of cases, each a plain conjunction of constraints.

`allOf`, `anyOf`, `oneOf`, `not`, `if`, references, dependencies and the `unevaluated` keywords are
worked out here, exactly: a text is valid for the schema if and only if it is for one of the cases.
A case holds only constraints that a grammar can enforce; what it cannot (`uniqueItems`, say)
belongs to one type, and is refused when a case still allows that type.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from engine.checks import shown
from engine.structured.case import (
    ALL_TYPES,
    FALSE,
    Case,
    Conjunction,
    Items,
    Literal,
    Properties,
    Seen,
    merged,
    needed_items,
    needed_properties,
    type_of,
    value_key,
)
from engine.structured.keywords import ANNOTATIONS, CHECKS, COUNTS, GROUPS, SINCE, UNCHECKED
from engine.structured.patterns import translated, without_look_ahead
from engine.structured.references import OWN_DOCUMENT, Document, Draft, SchemaError, Subschema

__all__ = ["Cases"]

MAX_CASES = 4096  # cases of one conjunction
MAX_WORK = 200_000  # merged cases in total
_MAX_REFERENCES = 100  # references followed to a reference's target
_MAX_DEPTH = 4  # levels of properties and items searched for a contradiction


class Cases:
    """Computes the cases of conjunctions.

    Parameters
    ----------
    accepts : callable
        Whether a text, as a JSON string, is valid for a schema of one string: the same dialect of
        regular expressions as the masks'.
    knows_format : callable
        Whether a `format` can be enforced. Others are annotations.

    Attributes
    ----------
    warnings : dict of str to None
        What was not enforced, and is no constraint of JSON Schema.
    """

    def __init__(
        self, accepts: Callable[[dict[str, Any], str], bool], knows_format: Callable[[str], bool]
    ) -> None:
        self.warnings: dict[str, None] = {}
        self._accepts = accepts
        self._knows_format = knows_format
        self._matched: dict[tuple[str, str], bool] = {}
        self._of_conjunction: dict[tuple[frozenset[Literal], bool], list[Case]] = {}
        self._of_literal: dict[tuple[Subschema, bool, bool], list[Case] | None] = {}
        self._documents: dict[Subschema, Document] = {}
        self._empty: dict[frozenset[Literal], bool] = {}
        self._work = 0

    # ---- conjunctions

    def of(self, conjunction: Conjunction, *, scope: bool = False) -> list[Case]:
        """Return the cases of a conjunction; none if nothing is valid.

        With `scope`, cases carry what they have evaluated.

        Raises
        ------
        SchemaError
            If the schema is invalid, refers to itself without end, or has too many cases.
        """
        key = frozenset(conjunction), scope
        found = self._of_conjunction.get(key)
        if found is None:
            found = [Case()]
            for schema, wanted in conjunction:
                found = self.product(found, self._literal(schema, wanted, scope))
            self._of_conjunction[key] = found
        return found

    def product(self, *choices: list[Case]) -> list[Case]:
        """Return the cases in which one case of each choice holds."""
        found = choices[0]
        for choice in choices[1:]:
            pairs = len(found) * len(choice)
            self._work += pairs
            if self._work > MAX_WORK:
                raise SchemaError(f"it combines to more than {MAX_WORK} alternatives")
            both = [merged(one, other, self.matches) for one in found for other in choice]
            found = [case for case in both if case.types]
            if len(found) > MAX_CASES:
                raise SchemaError(f"it combines to more than {MAX_CASES} alternatives")
        return found

    def matches(self, pattern: str, name: str) -> bool:
        """Return whether a property name matches a pattern."""
        key = pattern, name
        if key not in self._matched:
            self._matched[key] = self._accepts({"type": "string", "pattern": pattern}, name)
        return self._matched[key]

    def is_empty(self, conjunction: Conjunction, depth: int = _MAX_DEPTH) -> bool:
        """Return whether a conjunction is known to allow nothing."""
        if not conjunction:
            return False
        key = frozenset(conjunction)
        if key in self._empty:
            return self._empty[key]
        found = all(self.is_empty_case(case, depth) for case in self.of(conjunction))
        if found or depth == _MAX_DEPTH:
            self._empty[key] = found
        return found

    def is_empty_case(self, case: Case, depth: int = _MAX_DEPTH) -> bool:
        """Return whether a case is known to allow nothing."""
        if not case.types <= {"array", "object"}:
            return False
        facts = case.facts
        if "values" in facts:
            return not facts["values"]
        return all(
            depth > 0 and any(self.is_empty(one, depth - 1) for one in needed)
            for needed in (
                needed_items(facts) if kind == "array" else needed_properties(facts)
                for kind in case.types
            )
        )

    # ---- schemas

    def referred(self, schema: Subschema) -> Subschema:
        """Return the target of a schema that is a reference and nothing else; others unchanged."""
        for _ in range(_MAX_REFERENCES):
            if not isinstance(schema.value, dict) or self._keywords(schema) != ["$ref"]:
                break
            schema = schema.document.target(schema, "$ref")
        return schema

    def _literal(self, schema: Subschema, wanted: bool, scope: bool) -> list[Case]:
        key = schema, wanted, scope
        if key in self._of_literal:
            found = self._of_literal[key]
            if found is None:
                raise schema.error("it refers to itself without an object or array between")
            return found
        self._of_literal[key] = None
        found = self._schema(schema, wanted, scope)
        if not scope:
            found = [case.without("seen") if "seen" in case.facts else case for case in found]
        self._of_literal[key] = found
        return found

    def _schema(self, schema: Subschema, wanted: bool, scope: bool) -> list[Case]:
        value = schema.value
        if isinstance(value, bool):
            return [Case()] if value == wanted else []
        if OWN_DOCUMENT in value:
            if schema not in self._documents:
                where = f"{value['title']}#" if "title" in value else schema.where
                self._documents[schema] = Document(value[OWN_DOCUMENT], where)
            found = self.of(((self._documents[schema].root, wanted),), scope=scope)
            if "type" not in value or not wanted:
                return found
            found = self.product(found, self._keyword(schema, "type", True, scope))
            if not found:
                root = self._documents[schema].root
                raise root.error(f"the arguments of a call must be an {value['type']}")
            return found
        keys = self._keywords(schema)
        late = [key for key in keys if key.startswith("unevaluated")]
        if not wanted:
            if late:
                reason = f"the negation of {late[0]} cannot be enforced"
                return [Case(refused=tuple((kind, reason) for kind in ALL_TYPES))]
            found = []
            for key in keys:
                found += self._keyword(schema, key, False, False)
            return found
        found = [Case()]
        for key in keys:
            if key not in late:
                choice = self._keyword(schema, key, True, scope or bool(late))
                found = self.product(found, choice)
        for key in late:
            rest = _one(schema.child(key))
            found = [
                merged(case, _unevaluated(schema, key, case, rest), self.matches) for case in found
            ]
            found = [case for case in found if case.types]
        return found

    def _keywords(self, schema: Subschema) -> list[str]:
        """Return the keywords to work out: one of each group that belongs together."""
        value = schema.value
        if schema.draft <= Draft.DRAFT_7 and "$ref" in value:
            return ["$ref"]
        found: dict[str, None] = {}
        for key in value:
            if schema.draft < SINCE.get(key, 0) or key in ANNOTATIONS or key[:2] == "x-":
                if key in UNCHECKED:
                    self.warnings[f"{key} is an annotation; it is not enforced"] = None
                continue
            if key not in CHECKS:
                self.warnings[f"{shown(key)} is no keyword of JSON Schema; it is not enforced"] = (
                    None
                )
                continue
            if key == "required" and isinstance(value[key], bool):  # draft 3, still written
                self.warnings["a boolean required is no list of names; it is not enforced"] = None
                continue
            is_valid, wanted = CHECKS[key]
            if not is_valid(value[key]):
                raise schema.error(f"{key} must be {wanted}; got {shown(value[key])}")
            group = GROUPS.get(key, key)
            if group in value or group not in ("if", "contains"):
                found[group] = None
        return list(found)

    def _keyword(self, schema: Subschema, key: str, wanted: bool, scope: bool) -> list[Case]:
        match key:
            case "$ref" | "$dynamicRef" | "$recursiveRef":
                target = schema.document.target(schema, key)
                return self.of(((target, wanted),), scope=scope and wanted)
            case "not":
                return self.of(((schema.child("not"), not wanted),))
            case "allOf":
                return self._all_of(schema, wanted, scope)
            case "anyOf":
                return self._any_of(schema, wanted, scope)
            case "oneOf":
                return self._one_of(schema, wanted, scope)
            case "if":
                return self._if(schema, wanted, scope)
            case "dependencies":
                return self._dependencies(schema, wanted, scope)
            case "properties":
                return self._properties(schema, wanted)
            case "items":
                return _items(schema, wanted)
            case "contains":
                return self._contains(schema, wanted)
            case "propertyNames":
                if wanted:
                    return [Case(names=_one(schema.child(key)))]
                return _refused(schema, "the negation of propertyNames", "object")
            case "format":
                return self._format(schema, wanted)
        return _simple(schema, key, schema.value[key], wanted)

    def _all_of(self, schema: Subschema, wanted: bool, scope: bool) -> list[Case]:
        options = _options(schema, "allOf")
        if wanted:
            return self.of(tuple((option, True) for option in options), scope=scope)
        return [case for option in options for case in self.of(((option, False),))]

    def _any_of(self, schema: Subschema, wanted: bool, scope: bool) -> list[Case]:
        options = _options(schema, "anyOf")
        if not wanted:
            return self.of(tuple((option, False) for option in options))
        choices = [self.of(((option, True),), scope=scope) for option in options]
        found: list[Case] = []
        for choice in choices:
            # What another option has evaluated too counts, so each subset is a case.
            both = self.product(found, choice) if scope else []
            found = [*found, *choice, *both]
            if len(found) > MAX_CASES:
                raise schema.error(f"anyOf combines to more than {MAX_CASES} alternatives")
        return found

    def _one_of(self, schema: Subschema, wanted: bool, scope: bool) -> list[Case]:
        options = _options(schema, "oneOf")
        yes = [self.of(((option, True),), scope=scope) for option in options]
        if wanted and all(case.facts.keys() == {"values"} for one in yes for case in one):
            # Cases of one option may share values.
            by_option = [
                {value_key(value): value for case in one for value in case.facts["values"]}
                for one in yes
            ]
            times = Counter(key for values in by_option for key in values)
            once = tuple(
                value for values in by_option for key, value in values.items() if times[key] == 1
            )
            return [Case(set(map(type_of, once)), values=once)]
        found = [] if wanted else self.of(tuple((option, False) for option in options))
        overlaps: dict[int, list[int]] = {i: [] for i in range(len(options))}
        for i, one in enumerate(yes):
            for j in range(i):
                both = self.product(one, yes[j])
                both = [case for case in both if not self.is_empty_case(case)]
                if both:
                    overlaps[i].append(j)
                    overlaps[j].append(i)
                    found += [] if wanted else both
        if wanted:
            for i, one in enumerate(yes):
                others = [self.of(((options[j], False),)) for j in overlaps[i]]
                found += self.product(one, *others)
        return found

    def _if(self, schema: Subschema, wanted: bool, scope: bool) -> list[Case]:
        found: list[Case] = []
        condition = schema.child("if")
        if not scope and not {"then", "else"} & schema.value.keys():
            return [Case()] if wanted else []
        for key, holds in (("then", True), ("else", False)):
            choice = self.of(((condition, holds),), scope=scope and holds)
            if key in schema.value:
                one = self.of(((schema.child(key), wanted),), scope=scope)
                found += self.product(choice, one)
            elif wanted:
                found += choice
        return found

    def _dependencies(self, schema: Subschema, wanted: bool, scope: bool) -> list[Case]:
        found = [Case()] if wanted else []
        for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
            if schema.draft < SINCE.get(keyword, 0):
                continue
            for name, needed in schema.value.get(keyword, {}).items():
                present = Case(("object",), required=(name,))
                if isinstance(needed, list):
                    if wanted:
                        then = [Case(required=tuple(needed))]
                    else:
                        then = [_absent(other) for other in needed]
                else:
                    then = self.of(((schema.child(keyword, name), wanted),), scope=scope)
                if wanted:
                    absent = Case(properties=Properties({name: FALSE}))
                    found = self.product(found, [absent, *self.product([present], then)])
                else:
                    found += self.product([present], then)
        return found

    def _properties(self, schema: Subschema, wanted: bool) -> list[Case]:
        value = schema.value
        names = {name: schema.child("properties", name) for name in value.get("properties", {})}
        patterns: dict[str, Subschema] = {}
        for pattern in value.get("patternProperties", {}):
            ours = translated(schema, pattern)
            if ours in patterns:
                raise schema.error(f"two patternProperties mean {shown(pattern)}")
            patterns[ours] = schema.child("patternProperties", pattern)
        others = schema.child("additionalProperties") if "additionalProperties" in value else None
        if wanted:
            seen = Seen(names, patterns if others is None else ("",))
            properties = Properties(
                {name: _one(one) for name, one in names.items()},
                {name: _one(one) for name, one in patterns.items()},
                () if others is None else _one(others),
            )
            return [Case(properties=properties, seen=seen)]
        found = [
            Case(("object",), required=(name,), properties=Properties({name: ((one, False),)}))
            for name, one in names.items()
            if one.value is not True
        ]
        if patterns or (others is not None and others.value is not True):
            what = "the negation of patternProperties or additionalProperties"
            found += _refused(schema, what, "object")
        return found

    def _contains(self, schema: Subschema, wanted: bool) -> list[Case]:
        value = schema.value
        has_counts = schema.draft >= Draft.DRAFT_2019
        least = int(value.get("minContains", 1)) if has_counts else 1
        most = int(value["maxContains"]) if has_counts and "maxContains" in value else math.inf
        one = schema.child("contains")
        seen = Seen(by_contains=schema.draft >= Draft.DRAFT_2020)
        if not self.of(((one, False),)):  # every item counts
            facts: dict[str, Any] = {"min_items": least} | (
                {} if most == math.inf else {"max_items": int(most)}
            )
            if wanted:
                return [Case(seen=seen, **facts)]
            found = [Case(("array",), max_items=least - 1)] if least else []
            return found + ([] if most == math.inf else [Case(("array",), min_items=int(most) + 1)])
        if self.is_empty(((one, True),)):
            most = math.inf
            least = 1 if least else 0
        if least == 0 and most == math.inf:
            return [Case(seen=seen)] if wanted else []
        if least > most or self.is_empty(((one, True),)):
            return [Case(ALL_TYPES - {"array"})] if wanted else [Case(("array",))]
        none = Items((), ((one, False),))
        if wanted and most == 0:
            return [Case(items=none, seen=seen)]
        if not wanted and least == 1 and most == math.inf:
            return [Case(("array",), items=none)]
        return _refused(schema, "contains", "array", wanted)

    def _format(self, schema: Subschema, wanted: bool) -> list[Case]:
        name = schema.value["format"]
        if not self._knows_format(name):
            self.warnings[f"format {shown(name)} is an annotation; it is not enforced"] = None
            return [Case()] if wanted else []
        if wanted:
            return [Case(formats=(name,))]
        return _refused(schema, "the negation of format", "string")


# ---- keywords without schemas


def _items(schema: Subschema, wanted: bool) -> list[Case]:
    value = schema.value
    items = value.get("items")
    prefix: Sequence[Subschema] = ()
    rest: Subschema | None = None
    if isinstance(items, list):
        prefix = [schema.child("items", i) for i in range(len(items))]
        rest = schema.child("additionalItems") if "additionalItems" in value else None
    else:
        if schema.draft >= Draft.DRAFT_2020:
            count = len(value.get("prefixItems", ()))
            prefix = [schema.child("prefixItems", i) for i in range(count)]
        rest = schema.child("items") if items is not None else None
    if wanted:
        seen = Seen(items=len(prefix) if rest is None else math.inf)
        found = Items([_one(one) for one in prefix], () if rest is None else _one(rest))
        return [Case(items=found, seen=seen)]
    cases = [
        Case(("array",), min_items=i + 1, items=Items([()] * i + [((one, False),)]))
        for i, one in enumerate(prefix)
    ]
    if rest is not None and rest.value is False:
        cases.append(Case(("array",), min_items=len(prefix) + 1))
    elif rest is not None and rest.value is not True:
        cases += _refused(schema, "the negation of items", "array")
    return cases


def _simple(schema: Subschema, key: str, value: Any, wanted: bool) -> list[Case]:
    """Return the cases of a keyword that holds no schema."""
    match key:
        case "type":
            return _type(value, wanted)
        case "const" | "enum":
            values = (value,) if key == "const" else tuple(value)
            unique = tuple({value_key(item): item for item in values}.values())
            if not wanted:
                return [Case(excluded=tuple(value_key(item) for item in unique))]
            return [Case({type_of(item) for item in unique}, values=unique)] if unique else []
        case "minimum" | "exclusiveMinimum":
            return _bound(schema, key, wanted, is_low=True)
        case "maximum" | "exclusiveMaximum":
            return _bound(schema, key, wanted, is_low=False)
        case "multipleOf":
            if wanted:
                return [Case(multiples=(abs(value),))]
            return _refused(schema, "the negation of multipleOf", "number")
        case "pattern":
            if wanted:
                return [Case(patterns=without_look_ahead(translated(schema, value)))]
            return _refused(schema, "the negation of pattern", "string")
        case "uniqueItems":
            if not value:
                return [Case()] if wanted else []
            if wanted:
                return _refused(schema, "uniqueItems", "items", wanted)
            return _refused(schema, "the negation of uniqueItems", "array")
        case "required":
            if wanted:
                return [Case(required=tuple(dict.fromkeys(value)))] if value else [Case()]
            return [_absent(name) for name in value]
    fact, kind, is_least = COUNTS[key]
    count = int(value)
    if is_least and count == 0:
        return [Case()] if wanted else []
    if wanted:
        return [Case().limited(fact, count)]
    if is_least:
        return [Case((kind,)).limited(fact.replace("min", "max"), count - 1)]
    return [Case((kind,)).limited(fact.replace("max", "min"), count + 1)]


def _type(value: Any, wanted: bool) -> list[Case]:
    names = {value} if isinstance(value, str) else set(value)
    types = {"number" if name == "integer" else name for name in names}
    is_integer = "integer" in names and "number" not in names
    if wanted:
        return [Case(types, is_integer=True)] if is_integer else [Case(types)]
    found = [Case(ALL_TYPES - types)] if ALL_TYPES - types else []
    return [*found, Case(("number",), is_fraction=True)] if is_integer else found


def _bound(schema: Subschema, key: str, wanted: bool, *, is_low: bool) -> list[Case]:
    value = schema.value[key]
    if isinstance(value, bool):  # draft 4: whether the bound beside it is excluded
        beside = schema.value.get("minimum" if is_low else "maximum")
        if not value or beside is None:
            return [Case()] if wanted else []
        value = beside
    is_open = key.startswith("exclusive")
    if wanted:
        return [Case(low=(value, is_open))] if is_low else [Case(high=(value, not is_open))]
    if is_low:
        return [Case(("number",), high=(value, is_open))]
    return [Case(("number",), low=(value, not is_open))]


def _absent(name: str) -> Case:
    return Case(("object",), properties=Properties({name: FALSE}))


def _unevaluated(schema: Subschema, key: str, case: Case, rest: Conjunction) -> Case:
    """Return the case that `rest` holds for what `case` has not evaluated."""
    seen: Seen = case.facts.get("seen") or Seen()
    if key == "unevaluatedProperties":
        if "" in seen.patterns:
            return Case()
        properties = Properties(
            dict.fromkeys(sorted(seen.names), ()), dict.fromkeys(sorted(seen.patterns), ()), rest
        )
        return Case(properties=properties, seen=Seen(patterns=("",)))
    if seen.items == math.inf or not rest:
        return Case(seen=Seen(items=math.inf))
    if seen.by_contains:
        return _refused(schema, "unevaluatedItems beside contains", "array", wanted=True)[0]
    return Case(items=Items([()] * int(seen.items), rest), seen=Seen(items=math.inf))


def _refused(schema: Subschema, what: str, kind: str, wanted: bool = False) -> list[Case]:
    """Return a case that cannot be enforced for one type; `wanted`: other types are not concerned.

    The type "items" is that of arrays with more than one item.
    """
    reason = f"{what} cannot be enforced (at {schema.where[:200]})"
    return [Case(ALL_TYPES if wanted else (kind,), refused=((kind, reason),))]


def _one(schema: Subschema) -> Conjunction:
    if schema.value is False:
        return FALSE
    return () if schema.value is True or schema.value == {} else ((schema, True),)


def _options(schema: Subschema, key: str) -> list[Subschema]:
    return [schema.child(key, i) for i in range(len(schema.value[key]))]
