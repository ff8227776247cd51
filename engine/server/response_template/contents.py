"""Parsers of a region's text, as checkpoints name them, and templates that reshape the result."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["CONTENTS", "FormatError", "content_of", "lax_json", "transformed"]

_MAX_DEPTH = 32  # nested templates
_BARE_KEY = re.compile(r"([{,]\s*)([^\W\d][\w.\-]*)(\s*:)")
_JSON_STRING = r'"(?:[^"\\]|\\.)*+"'
_PLACEHOLDER = re.compile(r"\{(\w+)\}")


class FormatError(ValueError):
    """A format that a checkpoint declares is invalid, or does not fit a text."""


def content_of(text: str, name: str, args: Mapping[str, Any]) -> Any:
    """Return what a text means as content of a type.

    Examples
    --------
    >>> content_of(" 5 ", "int", {}), content_of("a: 1\\nb: 2", "kv-lines", {})
    (5, {'a': '1', 'b': '2'})
    """
    if name not in _PARSERS:
        raise FormatError(f"content must be one of {', '.join(_PARSERS)}; got {name!r}")
    return _PARSERS[name](text, args)


def lax_json(text: str, args: Mapping[str, Any]) -> Any:
    """Read JSON whose keys may lack quotes and whose strings may have other delimiters.

    Examples
    --------
    >>> lax_json("{a: 'x'}", {"unquoted_keys": True, "string_delims": [["'", "'"]]})
    {'a': 'x'}
    """
    pairs = args.get("string_delims") or []
    given = [rf"{re.escape(begin)}(.*?){re.escape(end)}" for begin, end in pairs]
    strings = re.compile("|".join((*given, _JSON_STRING)), re.DOTALL)
    has_bare_keys = args.get("unquoted_keys", False)
    parts = []
    at = 0
    for match in (*strings.finditer(text), None):
        between = text[at : match.start() if match else None]
        # A key may begin behind a string, so the comma before it is in this part.
        parts.append(_BARE_KEY.sub(r'\1"\2"\3', between) if has_bare_keys else between)
        if match is not None:
            inner = next((group for group in match.groups() if group is not None), None)
            parts.append(match[0] if inner is None else json.dumps(inner))
            at = match.end()
    try:
        return json.loads("".join(parts), parse_float=_real, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        if args.get("allow_non_json"):
            return text.strip()
        raise FormatError(f"no JSON ({error})") from None


def _real(text: str) -> float:
    """Return a number as a double; beyond the largest one, that, since JSON has no infinity."""
    return min(max(float(text), -sys.float_info.max), sys.float_info.max)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _text(text: str, args: Mapping[str, Any]) -> str:
    return text.strip() if args.get("strip", True) else text


def _number(kind: Callable[[str], Any]) -> Callable[[str, Mapping[str, Any]], Any]:
    def parse(text: str, _: Mapping[str, Any]) -> Any:
        try:
            return kind(text.strip())
        except ValueError:
            raise FormatError(f"no {kind.__name__}") from None

    return parse


def _bool(text: str, _: Mapping[str, Any]) -> bool:
    return text.strip().lower() in ("true", "1")


def _value(text: str, parser: Mapping[str, Any] | None) -> Any:
    if parser is None:
        return text
    return content_of(text, parser.get("name", "text"), parser.get("args") or {})


def _xml_inline(text: str, args: Mapping[str, Any]) -> dict[str, Any]:
    pattern = re.compile(args.get("tag_pattern", ""), re.DOTALL)
    if not {"key", "value"} <= pattern.groupindex.keys():
        raise FormatError("tag_pattern must have the groups key and value")
    found: dict[str, Any] = {}
    is_merged = set()
    for match in pattern.finditer(text):
        key = match["key"] or ""
        value = _value(match["value"] or "", args.get("value_parser"))
        if key not in found or not args.get("merge_duplicates"):
            found[key] = value
        elif key in is_merged:
            found[key].append(value)
        else:
            found[key] = [found[key], value]
            is_merged.add(key)
    return found


def _kv_lines(text: str, args: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for line in text.split(args.get("line_sep", "\n")):
        key, separator, value = line.partition(args.get("kv_sep", ":"))
        if separator:
            if args.get("strip", True):
                key = key.strip()
                value = value.strip()
            found[key] = _value(value, args.get("value_parser"))
    return found


_PARSERS: dict[str, Callable[[str, Mapping[str, Any]], Any]] = {
    "text": _text,
    "int": _number(int),
    "float": _number(float),
    "bool": _bool,
    "json": lax_json,
    "xml-inline": _xml_inline,
    "kv-lines": _kv_lines,
}


CONTENTS = tuple(_PARSERS)
"""Names of the types of content."""


def transformed(template: Any, values: Mapping[str, Any], depth: int = 0) -> Any:
    """Return a template in which strings such as "{name}" are replaced by values.

    Examples
    --------
    >>> transformed({"function": "{content}", "type": "function"}, {"content": {"name": "f"}})
    {'function': {'name': 'f'}, 'type': 'function'}
    """
    if depth > _MAX_DEPTH:
        raise FormatError(f"transform must have at most {_MAX_DEPTH} levels")
    if isinstance(template, dict):
        return {key: transformed(one, values, depth + 1) for key, one in template.items()}
    if isinstance(template, list):
        return [transformed(one, values, depth + 1) for one in template]
    if not isinstance(template, str) or (match := _PLACEHOLDER.fullmatch(template)) is None:
        return template
    if match[1] not in values:
        raise FormatError(f"transform has no value for {template}")
    return values[match[1]]
