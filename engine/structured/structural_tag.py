"""Structural tags: literal text, free text and JSON in one grammar, in XGrammar's format.

`normalized_tag` checks a structural tag and reduces it to few kinds of formats, with every schema
rewritten (`json_schema`). `tag_grammar` writes the result for llguidance.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine.checks import shown
from engine.structured.json_schema import MAX_CHARS, Accepts, normalized
from engine.structured.keyword_values import keyword_values
from engine.structured.lark import containing
from engine.structured.literal_values import literal_values
from engine.structured.references import SchemaError
from engine.structured.tag_forms import Form, choice, const, repeat, sequence
from engine.structured.tagged_values import tagged_values

__all__ = ["normalized_tag"]

MAX_COUNT = 1024  # maximum repetitions that a format may require or allow

_FIELDS: dict[str, dict[str, tuple[type, Any]]] = {
    "const_string": {"value": (str, ...)},
    "json_schema": {"json_schema": (object, ...), "any_whitespace": (bool, True)},
    "regex": {"pattern": (str, ...)},
    "grammar": {"grammar": (str, ...)},
    "any_text": {"excludes": (list, [])},
    "sequence": {"elements": (list, ...)},
    "or": {"elements": (list, ...)},
    "optional": {"content": (dict, ...)},
    "star": {"content": (dict, ...)},
    "plus": {"content": (dict, ...)},
    "repeat": {"content": (dict, ...), "min": (int, 0), "max": (int, ...)},
    "list": {"content": (dict, ...), "separator": (dict, ...), "max": (int, ...)},
    "tag": {"begin": (str, ...), "content": (dict, ...), "end": (str, ...)},
    "triggered_tags": {
        "triggers": (list, ...),
        "tags": (list, ...),
        "at_least_one": (bool, False),
        "stop_after_first": (bool, False),
        "excludes": (list, []),
    },
    "tags_with_separator": {
        "tags": (list, ...),
        "separator": (str, ...),
        "at_least_one": (bool, False),
        "stop_after_first": (bool, False),
    },
    "tagged_values": {
        "json_schema": (object, ...),
        "begin": (str, ...),
        "begin_json": ((str, type(None)), None),  # type: ignore[dict-item]
        "end": (str, ...),
        "close": (str, ...),
        "types": (dict, {}),
        "repeats_others": (bool, False),
        "excludes": (list, []),
        "strips": (bool, False),
    },
    "literal_values": {
        "json_schema": (object, ...),
        "begin": (str, ...),
        "end": (str, ...),
        "repeats_others": (bool, False),
        "never": (str, ""),
    },
    "keyword_values": {"json_schema": (object, ...), "repeats_others": (bool, False)},
}
_REPEATS = {"optional": (0, 1), "star": (0, None), "plus": (1, None)}


def normalized_tag(
    text: str, accepts: Accepts, knows_format: Callable[[str], bool]
) -> tuple[str, list[str]]:
    """Return a structural tag with rewritten schemas and few kinds of formats, and warnings.

    The kinds are "const_string", "regex" (with the text that ends it), "grammar", "any_text" (with
    the texts that end it), "json_schema", "sequence", "or", "repeat", "list" and "rules" (with the
    "rule" that refers to one).

    Parameters
    ----------
    text : str
        A structural tag.
    accepts, knows_format : callable
        See `json_schema.normalized`.

    Raises
    ------
    SchemaError
        If it is no valid structural tag, or a schema cannot be enforced exactly.
    """
    try:
        tag = json.loads(text)
        if not isinstance(tag, dict) or tag.get("type") != "structural_tag":
            raise SchemaError('type must be "structural_tag"')
        writer = _Normalizer(accepts, knows_format)
        found = writer.form(tag.get("format"), "format")
    except RecursionError:
        raise SchemaError("it nests too deeply") from None
    written = json.dumps(found, ensure_ascii=False, separators=(",", ":"))
    if len(written) > MAX_CHARS:
        raise SchemaError(f"rewritten, it has {len(written)} characters; the limit is {MAX_CHARS}")
    return written, writer.warnings


class _Normalizer:
    """Reduces formats; collects the warnings of their schemas."""

    def __init__(self, accepts: Accepts, knows_format: Callable[[str], bool]) -> None:
        self._accepts = accepts
        self._knows_format = knows_format
        self._schemas: dict[str, Any] = {}
        self.warnings: list[str] = []

    def form(self, given: object, where: str) -> Form:
        """Return a format in reduced form."""
        fields = _fields(given, where)
        kind = fields["type"]
        if kind in ("const_string", "regex", "grammar"):
            return fields
        if kind == "any_text":
            return {"type": kind, "excludes": _texts(fields["excludes"], where), "ends": []}
        if kind == "json_schema":
            fields["json_schema"] = self._schema(fields["json_schema"])
            return fields
        return self._composite(kind, fields, where)

    def _composite(self, kind: str, fields: Form, where: str) -> Form:
        if kind in ("sequence", "or"):
            elements = self._forms(fields["elements"], f"{where}.elements")
            return _in_a_row(elements, where) if kind == "sequence" else choice(elements)
        if kind in _REPEATS:
            return repeat(self.form(fields["content"], f"{where}.content"), *_REPEATS[kind])
        if kind == "repeat":
            low = fields["min"]
            high = fields["max"]
            if not 0 <= low <= high <= MAX_COUNT or high == 0:
                wanted = f"0 <= min <= max <= {MAX_COUNT} and max > 0"
                raise SchemaError(f"{where} must have {wanted}; got {low} and {high}")
            return repeat(self.form(fields["content"], f"{where}.content"), low, high)
        if kind == "list":
            if not 1 <= fields["max"] <= MAX_COUNT:
                raise SchemaError(f"{where}.max must be in [1, {MAX_COUNT}]; got {fields['max']}")
            content = self.form(fields["content"], f"{where}.content")
            separator = self.form(fields["separator"], f"{where}.separator")
            return {"type": kind, "content": content, "separator": separator, "max": fields["max"]}
        if kind == "tag":
            begin, content = self._tag(fields, where)
            return sequence(const(begin), content)
        if kind == "triggered_tags":
            return self._triggered(fields, where)
        if kind == "tags_with_separator":
            return self._separated(fields, where)
        if kind == "keyword_values":
            schema = self._schema(fields["json_schema"])
            return keyword_values(schema, repeats_others=fields["repeats_others"])
        if kind == "literal_values":
            schema = self._schema(fields["json_schema"])
            return literal_values(schema, fields, self._accepts, self.warnings)
        return self._tagged_values(fields, where)

    def _forms(self, given: Sequence[object], where: str) -> list[Form]:
        if not given:
            raise SchemaError(f"{where} must not be empty")
        return [self.form(one, f"{where}[{i}]") for i, one in enumerate(given)]

    def _schema(self, schema: object) -> Any:
        given = json.dumps(schema)
        if given not in self._schemas:
            text, warnings = normalized(given, self._accepts, self._knows_format)
            self.warnings += warnings
            self._schemas[given] = json.loads(text)
        return self._schemas[given]

    def _tag(self, fields: Form, where: str) -> tuple[str, Form]:
        """Return the beginning of a tag, and its content with its end."""
        content = self.form(fields["content"], f"{where}.content")
        if _is_open(content) and not fields["end"]:
            raise SchemaError(f"{where}.end must not be empty after any_text")
        return fields["begin"], _closed(content, fields["end"], f"{where}.content")

    def _tags(self, given: Sequence[object], where: str) -> list[tuple[str, Form]]:
        if not given:
            raise SchemaError(f"{where} must not be empty")
        found = []
        for i, one in enumerate(given):
            place = f"{where}[{i}]"
            fields = _fields(one if not isinstance(one, dict) else {"type": "tag"} | one, place)
            if fields["type"] != "tag":
                raise SchemaError(f"{place} must be a tag; got {shown(fields['type'])}")
            found.append(self._tag(fields, place))
        return found

    def _triggered(self, fields: Form, where: str) -> Form:
        triggers = _texts(fields["triggers"], f"{where}.triggers")
        excludes = _texts(fields["excludes"], f"{where}.excludes")
        tags = self._tags(fields["tags"], f"{where}.tags")
        by_trigger: dict[str, list[Form]] = {}
        for i, (begin, content) in enumerate(tags):
            fitting = [trigger for trigger in triggers if trigger and begin.startswith(trigger)]
            if len(fitting) != 1:
                place = f"{where}.tags[{i}].begin"
                raise SchemaError(f"{place} must begin with one of triggers; got {shown(begin)}")
            rest = sequence(const(begin[len(fitting[0]) :]), content)
            by_trigger.setdefault(fitting[0], []).append(rest)
        text: Form = {"type": "any_text", "excludes": excludes, "ends": []}
        calls = choice([sequence(text | {"ends": [t]}, choice(of)) for t, of in by_trigger.items()])
        plain = text | {"excludes": [*excludes, *map(containing, triggers)]}
        if fields["stop_after_first"]:
            return calls if fields["at_least_one"] else choice([plain, calls])
        return sequence(repeat(calls, int(fields["at_least_one"]), None), plain)

    def _separated(self, fields: Form, where: str) -> Form:
        tags = self._tags(fields["tags"], f"{where}.tags")
        one = choice([sequence(const(begin), content) for begin, content in tags])
        found = one
        if not fields["stop_after_first"]:
            separator = const(fields["separator"])
            found = {"type": "list", "content": one, "separator": separator, "max": MAX_COUNT}
        return found if fields["at_least_one"] else repeat(found, 0, 1)

    def _tagged_values(self, fields: Form, where: str) -> Form:
        types = fields["types"]
        if not all(isinstance(one, list) for one in types.values()):
            raise SchemaError(f"{where}.types must hold lists")
        schema = self._schema(fields["json_schema"])
        return tagged_values(schema, fields, self._accepts, self.warnings)


def _in_a_row(elements: Sequence[Form], where: str) -> Form:
    """Return a sequence in which free text ends with the literal text that follows it."""
    found: list[Form] = []
    for i, element in enumerate(elements):
        for one in element["elements"] if element["type"] == "sequence" else [element]:
            end = one.get("value")
            if end == "":
                continue
            if not found or not _is_open(found[-1]):
                found.append(one)
            elif end is None:
                wanted = "a const_string or a tag with a begin must follow any_text"
                raise SchemaError(f"{where}.elements[{i}]: {wanted}; got {shown(one['type'])}")
            else:
                found[-1] = _closed(found[-1], end, f"{where}.elements[{i - 1}]")
    return sequence(*found)


def _is_open(form: Form, *others: str) -> bool:
    """Return whether free text, or one of other kinds, may be last in a format, and has no end."""
    kind = form["type"]
    if kind in ("sequence", "or"):
        last = form["elements"][-1:] if kind == "sequence" else form["elements"]
        return any(_is_open(one, *others) for one in last)
    if kind in ("repeat", "list"):
        return _is_open(form["content"], *others)
    if kind == "any_text":
        return not form["ends"]
    return kind in others and not form.get("end")


def _closed(form: Form, end: str, where: str) -> Form:
    """Return a format followed by `end`, which ends free text and expressions at its end."""
    kind = form["type"]
    if not _is_open(form, "regex"):
        return sequence(form, const(end))
    if kind == "any_text":
        return form | {"ends": [end]}
    if kind == "regex":
        return form | {"end": end}
    if kind == "sequence":
        *before, last = form["elements"]
        return sequence(*before, _closed(last, end, where))
    if kind == "or":
        return choice([_closed(one, end, where) for one in form["elements"]])
    if form.get("min") == 0 and form["max"] == 1:
        return choice([const(end), _closed(form["content"], end, where)])
    if _is_open(form):
        raise SchemaError(f"{where}: any_text that repeats must not be followed by text")
    return sequence(form, const(end))


def _fields(given: object, where: str) -> Form:
    """Return a format's fields, with defaults, after checking their types."""
    if not isinstance(given, Mapping):
        raise SchemaError(f"{where} must be an object; got {shown(given)}")
    kind = given.get("type")
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise SchemaError(f"{where}.type must be one of {', '.join(_FIELDS)}; got {shown(kind)}")
    known = _FIELDS[kind]
    found: Form = {"type": kind}
    for name in given:
        if name != "type" and name not in known:
            raise SchemaError(f"{where} has an unknown field {shown(name)}")
    for name, (wanted, default) in known.items():
        value = given.get(name, default)
        if value is ...:
            raise SchemaError(f"{where}.{name} is missing")
        is_flag = isinstance(value, bool) and wanted is int
        if not isinstance(value, wanted) or is_flag:
            raise SchemaError(f"{where}.{name} is of a wrong type; got {shown(value)}")
        found[name] = value
    return found


def _texts(given: Sequence[object], where: str) -> list[str]:
    if not all(isinstance(one, str) for one in given):
        raise SchemaError(f"{where} must be a list of texts; got {shown(given)}")
    return list(map(str, given))
