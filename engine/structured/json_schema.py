"""Rewrites a JSON schema to one that llguidance enforces exactly.

The result has one definition for each schema of a property or item, no references to anything else,
and only the keywords `anyOf`, `enum`, `type` and those of one type. What cannot be enforced exactly
is refused, with its reason and place.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from decimal import Decimal
from typing import Any

from engine.structured.case import ALL_TYPES, Case, Conjunction, Properties, type_of, whole_bounds
from engine.structured.cases import Cases
from engine.structured.patterns import all_but
from engine.structured.references import Document, SchemaError

__all__ = ["normalized"]

MAX_CHARS = 1 << 22
MAX_DEFINITIONS = 20_000
_MAX_CHOICES = 64  # choices of present properties, for minProperties and maxProperties
_MAX_EXACT = 2.0**63 - 1024  # largest double that is a 64-bit integer
_LEAST = 1e-15  # stands for the number after 0 in a range within -1 and 1
_MAX_DECIMALS = 6  # decimals of a multipleOf whose multiples may be written with fewer of them
_KEEPS_ONE_SPELLING = {"json_allowed_escapes": 'nrbtf"\\'}

# Days and seconds that llguidance's formats allow beside those of a calendar: 29 February of a
# year without one, and second 60 of any minute. A leap second, which few parsers read, is left out.
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DAY = rf"^(?:[0-9]{{4}}-(?:0[13-9]|1[0-2]|02-(?:[01]|2[0-8]))|{_LEAP_YEAR}-02-29)"
_SECOND = ":[0-9]{2}:[0-5]"
_FORMAT_PATTERNS = {"date": (_DAY,), "date-time": (_DAY, _SECOND), "time": (_SECOND,)}

# Which facts of a case concern which type.
_FACTS = {
    "null": ("excluded",),
    "boolean": ("excluded",),
    "number": ("low", "high", "multiples", "is_integer", "is_fraction", "excluded"),
    "string": ("min_length", "max_length", "patterns", "formats", "excluded"),
    "array": ("min_items", "max_items", "items", "excluded"),
    "object": (
        *("properties", "required", "min_properties", "max_properties", "names", "excluded"),
    ),
}

Accepts = Callable[[dict[str, Any], str], bool]


def normalized(
    text: str, accepts: Accepts, knows_format: Callable[[str], bool]
) -> tuple[str, list[str]]:
    """Return a schema that allows what the schema `text` does, and warnings.

    Parameters
    ----------
    text : str
        A JSON schema.
    accepts : callable
        Whether a string is valid for a schema of strings, of `type`, `pattern` and lengths only.
    knows_format : callable
        Whether a `format` can be enforced.

    Raises
    ------
    SchemaError
        If it is no valid schema, cannot be enforced exactly, allows nothing, or is too large.
    """
    try:
        document = Document(json.loads(text))
        cases = Cases(accepts, knows_format)
        found = _Writer(cases, accepts).write(((document.root, True),))
    except RecursionError:
        raise SchemaError("it nests too deeply") from None
    except OverflowError:
        raise SchemaError("it has a number that is too large") from None
    written = json.dumps(found, ensure_ascii=False, separators=(",", ":"))
    if len(written) > MAX_CHARS:
        raise SchemaError(f"rewritten, it has {len(written)} characters; the limit is {MAX_CHARS}")
    return written, list(cases.warnings)


class _Writer:
    """Writes conjunctions as definitions of one schema."""

    def __init__(self, cases: Cases, accepts: Accepts) -> None:
        self._cases = cases
        self._accepts = accepts
        self._names: dict[frozenset[Any], str] = {}
        self._todo: list[tuple[str, Conjunction]] = []
        self._has_open_names = False

    def write(self, root: Conjunction) -> dict[str, Any]:
        if self._cases.is_empty(root):
            raise SchemaError("no text matches it")
        found = self._choice(self._cases.of(root))
        if found is False:
            raise SchemaError("no text matches it")
        result: dict[str, Any] = {} if found is True else dict(found)
        definitions: dict[str, Any] = {}
        while self._todo:
            name, conjunction = self._todo.pop()
            definitions[name] = self._choice(self._cases.of(conjunction))
        if definitions:
            result["$defs"] = definitions
        if self._has_open_names:
            # Else a name that has its own schema could be spelled with an escape, as another.
            result["x-guidance"] = _KEEPS_ONE_SPELLING
        return result

    def _child(self, conjunction: Conjunction) -> Any:
        """Return a schema of a property or item: a reference, if it has children itself."""
        if not conjunction:
            return True
        conjunction = tuple(
            (self._cases.referred(schema), wanted) for schema, wanted in conjunction
        )
        key = frozenset(conjunction)
        name = self._names.get(key)
        if name is None:
            if self._cases.is_empty(conjunction):
                return False
            cases = self._cases.of(conjunction)
            if not any({"items", "properties", "names"} & case.facts.keys() for case in cases):
                return self._choice(cases)
            name = str(len(self._names))
            if len(self._names) == MAX_DEFINITIONS:
                raise SchemaError(f"it has more than {MAX_DEFINITIONS} different subschemas")
            self._names[key] = name
            self._todo.append((name, conjunction))
        return {"$ref": f"#/$defs/{name}"}

    def _choice(self, cases: Sequence[Case]) -> Any:
        """Return the schema that one of the cases holds; a bool if that is trivial."""
        options: dict[str, dict[str, Any]] = {}
        for case in cases:
            if not self._cases.is_empty_case(case):
                for option in self._case(case):
                    options[json.dumps(option)] = option
        found = list(options.values())
        if not found:
            return False
        if {} in found:
            return True
        return found[0] if len(found) == 1 else {"anyOf": found}

    def _case(self, case: Case) -> list[dict[str, Any]]:
        facts = case.facts
        for kind, reason in facts.get("refused", ()):
            is_concerned = kind in case.types
            if kind == "items":
                is_concerned = "array" in case.types and facts.get("max_items", 2) > 1
            if is_concerned:
                raise SchemaError(reason)
        if case.types == ALL_TYPES and not facts.keys() - {"refused"}:
            return [{}]
        if "values" in facts:
            return self._constants(facts)
        found: list[dict[str, Any]] = []
        plain: list[str] = []
        for kind in sorted(case.types):
            own = {name: facts[name] for name in _FACTS[kind] if name in facts}
            if kind == "number" and own == {"is_integer": True}:
                plain.append("integer")
            elif own:
                found += self._typed(kind, own)
            else:
                plain.append(kind)
        if plain:
            found.insert(0, {"type": plain[0] if len(plain) == 1 else plain})
        return found

    def _constants(self, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
        plain: list[Any] = []
        found: list[dict[str, Any]] = []
        for kind in sorted(ALL_TYPES):
            values = [value for value in facts["values"] if type_of(value) == kind]
            ignored = {"low", "high", "is_integer", "is_fraction", "excluded"}
            own = {n: facts[n] for n in _FACTS[kind] if n in facts and n not in ignored}
            for value in values:
                _check_numbers(value)
            if values and own:
                found += [option | {"enum": values} for option in self._typed(kind, own)]
            else:
                plain += values
        order = {json.dumps(value): i for i, value in enumerate(facts["values"])}
        plain.sort(key=lambda value: order[json.dumps(value)])
        return [{"enum": plain}, *found] if plain else found

    def _typed(self, kind: str, facts: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the schemas of one type with at least one constraint; any may hold."""
        excluded = [json.loads(key) for key in facts.get("excluded", ())]
        excluded = [value for value in excluded if type_of(value) == kind]
        if kind == "number":
            return _numbers(facts, excluded)
        if kind == "string":
            return [_string(facts, set(excluded))]
        if excluded and kind in ("array", "object"):
            raise SchemaError(f"the negation of a constant {kind} cannot be enforced")
        if kind == "array":
            return [self._array(facts)]
        if kind == "object":
            return self._objects(facts)
        return [{"enum": [not excluded[0]]}] if excluded else [{"type": kind}]

    def _array(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {"type": "array"}
        items = facts.get("items")
        if items is not None:
            if items.prefix:
                found["prefixItems"] = [self._child(one) for one in items.prefix]
            found["items"] = self._child(items.rest)
        for fact, keyword in (("min_items", "minItems"), ("max_items", "maxItems")):
            if fact in facts:
                found[keyword] = facts[fact]
        return found

    def _objects(self, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
        properties: Properties = facts.get("properties") or Properties()
        names = {name: self._child(one) for name, one in properties.names.items()}
        patterns = {name: self._child(one) for name, one in properties.patterns.items()}
        others = self._child(properties.others)
        required = list(facts.get("required", ()))
        for name in dict.fromkeys([*names, *required]):
            if any(self._cases.matches(pattern, name) for pattern in patterns):
                names[name] = self._property(properties, name)
        if "names" in facts:
            names, patterns, others = self._restricted(
                names, patterns, others, required, facts["names"], properties
            )
        if others is False:
            known = dict.fromkeys([*names, *required])
            for pattern in [p for p in patterns if self._is_used_up(p, known)]:
                del patterns[pattern]
                for name in known:
                    if names.get(name) is not False and self._cases.matches(pattern, name):
                        names[name] = self._property(properties, name)
        elif names or patterns:
            self._has_open_names = True
        found: dict[str, Any] = {"type": "object", "additionalProperties": others}
        if patterns:
            found["patternProperties"] = patterns
        is_closed = others is False and not patterns
        optional = [
            name for name, one in names.items() if name not in required and one is not False
        ]
        least = facts.get("min_properties", 0)
        most = facts.get("max_properties", math.inf)
        if least <= len(required):
            least = 0
        if is_closed and most >= len(required) + len(optional):
            most = math.inf
        options = []
        for present, absent in _presences(
            optional, least - len(required), most - len(required), is_closed=is_closed
        ):
            option = dict(found)
            if names:
                option["properties"] = names | dict.fromkeys(absent, False)
            if needed := [*required, *present]:
                option["required"] = needed
            if least > len(needed):
                option["minProperties"] = least
            if most < math.inf and not is_closed:
                option["maxProperties"] = most
            options.append(option)
        return options

    def _property(self, properties: Properties, name: str) -> Any:
        """Return the schema of one property: its own, and those of the patterns that match it."""
        patterns = properties.patterns.items()
        found = [one for pattern, one in patterns if self._cases.matches(pattern, name)]
        if name in properties.names:
            found.append(properties.names[name])
        return self._child(tuple(dict.fromkeys(itertools.chain(*found or [properties.others]))))

    def _is_used_up(self, pattern: str, names: Collection[str]) -> bool:
        """Return whether a pattern matches no name but some of `names`, and at least one of these.

        llguidance would allow a comma for one more property, and then no name.
        """
        matched = {name for name in names if self._cases.matches(pattern, name)}
        if not matched:
            return False
        others = {"type": "string", "pattern": all_but(matched)}
        try:
            self._accepts({"type": "string", "pattern": pattern, "allOf": [others]}, "")
        except SchemaError as error:
            return "is empty" in str(error)
        return False

    def _restricted(
        self,
        names: dict[str, Any],
        patterns: dict[str, Any],
        others: Any,
        required: Sequence[str],
        rule: Conjunction,
        properties: Properties,
    ) -> tuple[dict[str, Any], dict[str, Any], Any]:
        """Return names, patterns and the schema of other properties under `propertyNames`."""
        cases = self._cases.product([Case(("string",))], self._cases.of(rule))
        rules = [option for case in cases for option in self._case(case)]
        names = {
            name: one if any(self._accepts(option, name) for option in rules) else False
            for name, one in names.items()
        }
        for name in required:
            if name not in names and not any(self._accepts(option, name) for option in rules):
                names[name] = False
        if others is False and not patterns:
            return names, patterns, others
        if all("enum" in option for option in rules):
            for option in rules:
                rule_of_all = {key: value for key, value in option.items() if key != "enum"}
                for name in option["enum"]:
                    is_allowed = not rule_of_all or self._accepts(rule_of_all, name)
                    if is_allowed and names.get(name) is not False:
                        names[name] = self._property(properties, name)
            return names, {}, False
        if {"type": "string"} in rules:
            return names, patterns, others
        if patterns or (others is not True and names):
            raise SchemaError(
                "propertyNames beside patternProperties or additionalProperties cannot be enforced"
            )
        return names, dict.fromkeys(map(_pattern_of, rules), others), False


def _presences(
    optional: Sequence[str], least: float, most: float, *, is_closed: bool
) -> list[tuple[Sequence[str], Sequence[str]]]:
    """Return choices of (present, absent) properties; together they leave the others open."""
    if not optional or (least <= 0 and most == math.inf):
        return [((), ())]
    count = len(optional)
    chosen: list[tuple[Sequence[str], Sequence[str]]] = []
    if is_closed and most == math.inf and math.comb(count, int(least)) <= _MAX_CHOICES:
        chosen = [(present, ()) for present in itertools.combinations(optional, int(least))]
    elif is_closed and least <= 0 and math.comb(count, int(most)) <= _MAX_CHOICES:
        for free in itertools.combinations(optional, int(most)):
            chosen.append(((), [name for name in optional if name not in free]))
    elif 2**count <= _MAX_CHOICES:
        for size in range(count + 1):
            if size > most or (is_closed and size < least):
                continue
            for present in itertools.combinations(optional, size):
                chosen.append((present, [name for name in optional if name not in present]))
    else:
        raise SchemaError(
            f"minProperties and maxProperties cannot be enforced with {count} optional properties: "
            f"they need more than {_MAX_CHOICES} alternatives"
        )
    return chosen


def _pattern_of(option: Mapping[str, Any]) -> str:
    """Return the pattern that a schema of strings is."""
    if option.keys() == {"type", "pattern"}:
        return str(option["pattern"])
    if option.keys() <= {"type", "minLength", "maxLength"}:
        most = option.get("maxLength", "")
        return rf"^[\s\S]{{{option.get('minLength', 0)},{most}}}$"
    raise SchemaError("propertyNames can be enforced with a pattern, an enum or lengths only")


def _string(facts: Mapping[str, Any], excluded: set[str]) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "string"}
    for fact, keyword in (("min_length", "minLength"), ("max_length", "maxLength")):
        if fact in facts:
            found[keyword] = facts[fact]
    patterns = list(facts.get("patterns", ()))
    for name in facts.get("formats", ()):
        patterns += _FORMAT_PATTERNS.get(name, ())
    if excluded:
        patterns.append(all_but(excluded))
    further = []
    for keyword, values in (("pattern", patterns), ("format", facts.get("formats", ()))):
        for i, value in enumerate(values):
            if i == 0:
                found[keyword] = value
            else:
                further.append({"type": "string", keyword: value})
    return found | ({"allOf": further} if further else {})


def _numbers(facts: Mapping[str, Any], excluded: Sequence[float]) -> list[dict[str, Any]]:
    if facts.get("is_fraction"):
        raise SchemaError("numbers that are not whole cannot be enforced")
    low = facts.get("low", (-math.inf, True))
    high = facts.get("high", (math.inf, False))
    ranges = []
    for value in sorted(excluded):
        if low[0] <= value <= high[0]:
            ranges.append((low, (value, False)))
            low = (value, True)
    ranges.append((low, high))
    multiples = facts.get("multiples", ())
    found = []
    for bottom, top in ranges:
        option: dict[str, Any] = {"type": "integer" if facts.get("is_integer") else "number"}
        if facts.get("is_integer"):
            least, greatest = whole_bounds(bottom, top)
            bottom = (least, False)
            top = (greatest, True)
        else:
            bottom, top = _apart(bottom, top)
        if bottom[0] > top[0] or (bottom[0] == top[0] and (bottom[1] or not top[1])):
            continue
        if bottom[0] > -math.inf:
            option["exclusiveMinimum" if bottom[1] else "minimum"] = _inside(bottom[0], up=True)
        if top[0] < math.inf:
            option["maximum" if top[1] else "exclusiveMaximum"] = _inside(top[0], up=False)
        if len(multiples) == 1 and option["type"] == "number":
            found += [option | {"multipleOf": value} for value in _spellings(multiples[0])]
            continue
        if multiples:
            option["multipleOf"] = multiples[0]
            further = [{"type": "number", "multipleOf": value} for value in multiples[1:]]
            option |= {"allOf": further} if further else {}
        found.append(option)
    return found


def _spellings(multiple: float) -> list[float]:
    """Return numbers whose multiples are, together, all texts of multiples of `multiple`.

    llguidance writes a multiple of 0.25 with two decimals: 0.50, but not 0.5.

    Examples
    --------
    >>> _spellings(0.25), _spellings(0.125), _spellings(0.01)
    ([0.25, 0.5], [0.125, 0.25, 0.5], [0.01])
    """
    exact = Decimal(str(multiple)).normalize()
    digits = -int(exact.as_tuple().exponent)
    count = int(exact.scaleb(digits)) if 1 < digits <= _MAX_DECIMALS else 1
    found = [multiple]
    if count > 1:
        shorter = (math.lcm(count, 10**left_out) for left_out in range(1, digits))
        found += dict.fromkeys(value / 10**digits for value in shorter)
    return found


def _apart(low: tuple[Any, bool], high: tuple[Any, bool]) -> tuple[Any, Any]:
    """Return bounds with the next double for a whole one that is excluded.

    Between bounds of equal whole parts, llguidance allows the whole part itself: 0 for 0 < x < 0.5.
    """
    bottom = low[0]
    top = high[0]
    if low[1] and 0 <= bottom == bottom // 1 and top < bottom + 1:
        low = (math.nextafter(bottom, math.inf) if bottom else _LEAST, False)
    if not high[1] and 0 >= top == top // 1 and bottom > top - 1:
        high = (math.nextafter(top, -math.inf) if top else -_LEAST, True)
    return low, high


def _inside(value: float, *, up: bool) -> float:
    """Return a bound as a double: the next one within the range, if it is none."""
    try:
        near = float(value)
    except OverflowError:
        near = math.inf
    if abs(near) > _MAX_EXACT:
        if (near > 0) == up:
            raise SchemaError(f"numbers beyond {_MAX_EXACT:.0f} cannot be enforced")
        return int(math.copysign(_MAX_EXACT, near))
    if up and near < value:
        near = math.nextafter(near, math.inf)
    elif not up and near > value:
        near = math.nextafter(near, -math.inf)
    return int(near) if near.is_integer() else near


def _check_numbers(value: object) -> None:
    """Refuse a constant with a number that a double does not hold."""
    todo = [value]
    while todo:
        one = todo.pop()
        if isinstance(one, list):
            todo += one
        elif isinstance(one, dict):
            todo += one.values()
        elif type_of(one) == "number":
            assert isinstance(one, int | float)
            if abs(one) > _MAX_EXACT or one != float(one):
                raise SchemaError(f"the constant {one!r:.40} cannot be enforced: it is too large")
