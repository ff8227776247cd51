"""`Layout`: how a checkpoint's own format writes calls, derived from how it reads them.

Formats are declared for reading: a delimiter may be a pattern, and the text of a call is taken
apart by templates. `layout_of` writes down one text that such a format reads, in parts, and returns
None where it cannot. A caller must check the texts with the reader: patterns can say more than is
understood here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from engine.server.response_template.contents import FormatError, transformed

__all__ = ["Layout", "Style", "layout_of", "sample"]

NAME = "$name"
ARGUMENTS = "$arguments"
SPACE = "\0"
"""In the text of a call: where white space may be."""

_CALLS = "tool_calls"
_GEMMA = '<|"|>'

# Parts of a pattern: a group, white space, any text, a part that may be absent, or a literal.
_PART = re.compile(
    r"""\(\?P<(?P<group>\w+)>(?P<of>(?:[^()\\\[\]]|\\.|\[(?:[^\]\\]|\\.)+\])*)\)
    |(?P<plain>\((?!\?)(?:[^()\\\[\]]|\\.|\[(?:[^\]\\]|\\.)+\])*\))
    |(?P<space>\\s[*+]\??)
    |(?P<any>\.\*\??)
    |(?P<absent>(?:\(\?:[^()]*\)|\\?[^()\[\]\\])[?*]\??)
    |\\(?P<escape>[^\w\s]|n)
    |(?P<literal>[^\\.^$*+?{}\[\]|()])""",
    re.VERBOSE | re.DOTALL,
)


@dataclass(frozen=True)
class Style:
    """How the arguments of a call are written.

    Attributes
    ----------
    kind : str
        "json", "literals" (`literal_values`) or "tags" (`tagged_values`).
    begin, end : str
        Around a string in literals; around a value between tags, `begin` with "{key}".
    reads_json : bool
        Whether a value between tags that looks like JSON is read as JSON.
    strips : bool
        Whether white space around a value between tags is dropped.
    """

    kind: str = "json"
    begin: str = ""
    end: str = ""
    reads_json: bool = False
    strips: bool = False


@dataclass(frozen=True)
class Layout:
    """Parts of a section of calls: ``begin call end``, or ``begin [call, call] end``.

    Attributes
    ----------
    begin, end : str
    call : str
        Text of a call, with "$name", "$arguments" and `SPACE`.
    style : Style
    is_list : bool
    has_lines : bool
        Whether a line break may follow `begin` and precede `end`.
    """

    begin: str
    call: str
    end: str
    style: Style
    is_list: bool = False
    has_lines: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, as JSON can hold them."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Layout:
        """Return the layout with these fields; see `to_dict`."""
        return cls(**{**fields, "style": Style(**fields["style"])})


def sample(layout: Layout, name: str, values: Mapping[str, str], count: int = 1) -> str:
    """Return a text of `count` calls of a function, with texts as arguments.

    Examples
    --------
    >>> layout = Layout("<call>", '{"name": "$name", "arguments": $arguments}', "</call>", Style())
    >>> sample(layout, "f", {"a": "x"})
    '<call>{"name": "f", "arguments": {"a": "x"}}</call>'
    """
    style = layout.style
    if style.kind == "json":
        written = json.dumps(values)
    elif style.kind == "literals":
        begin, end = (style.begin, style.end) if style.end else ('"', '"')
        written = "{" + ",".join(f"{key}:{begin}{one}{end}" for key, one in values.items()) + "}"
    else:
        items = values.items()
        written = "".join(style.begin.replace("{key}", k) + one + style.end for k, one in items)
    call = layout.call.replace(SPACE, "").replace(NAME, name).replace(ARGUMENTS, written)
    if layout.has_lines:
        call = f"\n{call}\n"
    if layout.is_list:
        return f"{layout.begin}[{', '.join([call] * count)}]{layout.end}"
    return f"{layout.begin}{call}{layout.end}" * count


def layout_of(kind: str, spec: Mapping[str, Any]) -> Layout | None:
    """Return the layout of the calls of a valid format, or None.

    Parameters
    ----------
    kind : str
        "response_template" or "response_schema".
    spec : mapping
    """
    try:
        found = _of_template(spec) if kind == "response_template" else _of_schema(spec)
    except (FormatError, AttributeError, TypeError, KeyError, RecursionError):
        return None  # not of a shape that is understood
    if found is None or found.call.count(NAME) != 1 or found.call.count(ARGUMENTS) != 1:
        return None
    style = replace(
        found.style,
        begin=found.style.begin.replace(SPACE, ""),
        end=found.style.end.replace(SPACE, ""),
    )
    begin = found.begin.replace(SPACE, "") if found.is_list else found.begin
    begin, space, rest = begin.partition(SPACE)
    end = found.end.replace(SPACE, "")
    found = replace(found, begin=begin, call=space + rest + found.call, end=end, style=style)
    return found if begin and end else None


# ---- templates


def _of_template(spec: Mapping[str, Any]) -> Layout | None:
    field = spec["fields"].get(_CALLS)
    if field is None:
        return None
    opening = _delimiter(field, "open")
    closing = _delimiter(field, "close")
    if opening is None or closing is None or NAME in closing:
        return None
    args = field.get("content_args") or {}
    found = _content(field.get("content", "text"), args)
    if found is None:
        return None
    groups = [NAME] if NAME in opening else []
    call, is_list = _written(field, groups)
    if not is_list and not field.get("repeats"):
        return None  # a second call would replace the first
    begin, name, rest = opening.partition(NAME)
    return Layout(begin, name + rest + call, closing, found, is_list)


def _delimiter(field: Mapping[str, Any], name: str) -> str | None:
    """Return a text that a delimiter matches, with "$name"; None if there is none."""
    if f"{name}_pattern" in field:
        return _text_of(field[f"{name}_pattern"], {"name": NAME})
    texts = field.get(name)
    texts = [texts] if isinstance(texts, str) else texts or []
    return next((one for one in texts if one != "eos"), None)


class _Mark(str):
    """Stands for a value that a template puts in its place."""


def _written(field: Mapping[str, Any], groups: Sequence[str]) -> tuple[str, bool]:
    """Return the text of a call, without the delimiters, and whether several make a list."""
    content = _Mark(ARGUMENTS)
    is_each = bool(field.get("transform_each"))
    keys: dict[str, Any] = {"name": _Mark(NAME)} if groups else {}
    names = set(re.findall(r"\{(\w+)\}", json.dumps(field.get("transform", ""))))
    if is_each:
        keys |= {name: _Mark(name) for name in names - {"content", *keys}}
    value: Any = content
    if "transform" in field:
        value = transformed(field["transform"], {**keys, "content": content})
    call = value.get("function", value) if isinstance(value, dict) else value
    if call is content:
        return '{"name": "$name", "arguments": $arguments}', is_each or "transform" not in field
    name = call["name"]
    arguments = call["arguments"]
    if is_each and isinstance(name, _Mark) and isinstance(arguments, _Mark):
        return f'{{{json.dumps(name)}: "$name", {json.dumps(arguments)}: $arguments}}', True
    if isinstance(name, _Mark) and arguments is content:
        return ARGUMENTS, False
    raise FormatError("a call of another shape")


def _content(kind: str, args: Mapping[str, Any]) -> Style | None:
    if kind == "json":
        return _json_style(args)
    if kind == "xml-inline":
        return _tags(args["tag_pattern"], _reads_json(args.get("value_parser")))
    if kind == "kv-lines":
        reads = _reads_json(args.get("value_parser"))
        strips = bool(args.get("strip", True))
        begin = f"{{key}}{args.get('kv_sep', ':')}{' ' if strips else ''}"
        end = args.get("line_sep", "\n")
        return None if reads is None else Style("tags", begin, end, reads, strips)
    return None


def _json_style(args: Mapping[str, Any]) -> Style:
    if not args.get("unquoted_keys"):
        return Style()
    begin, end = next(iter(args.get("string_delims") or []), ("", ""))
    return Style("literals", begin, end)


def _reads_json(parser: Mapping[str, Any] | None) -> bool | None:
    """Return whether values that look like JSON are read as such; None for other parsers."""
    name = "text" if parser is None else parser.get("name", "text")
    if name == "json" and (parser or {}).get("args", {}).get("allow_non_json"):
        return True
    return False if name == "text" else None


def _tags(pattern: str, reads_json: bool | None) -> Style | None:
    """Return the style of values between tags that a pattern finds."""
    written = _text_of(pattern, {"key": "{key}", "value": "\n{value}"})
    if reads_json is None or written is None or written.count("{key}") != 1:
        return None
    begin, _, end = written.partition("\n{value}")
    parts = list(_parts(pattern))
    at = next(i for i, part in enumerate(parts) if part["group"] == "value")
    strips = any(part["space"] for part in parts[at - 1 : at + 2])
    return Style("tags", begin, end, reads_json, strips) if "{key}" in begin and end else None


# ---- schemas


def _of_schema(spec: Mapping[str, Any]) -> Layout | None:
    calls = spec["properties"].get(_CALLS)
    if calls is None or "x-regex-iterator" not in calls or "x-regex" in calls:
        return None
    item = calls["items"]
    around = _text_of(calls["x-regex-iterator"], {"": ARGUMENTS})
    if around is None or around.count(ARGUMENTS) != 1:
        return None
    begin, _, end = around.partition(ARGUMENTS)
    if item.get("x-parser") == "json":
        call = '{"name": "$name", "arguments": $arguments}'
        return Layout(begin, call, end, _json_style(item.get("x-parser-args") or {}))
    inner = item if "x-regex" in item else item["properties"].get("function", item)
    call = _text_of(inner["x-regex"], {"name": NAME, "arguments": ARGUMENTS}) or ""
    style = _schema_style(inner["properties"]["arguments"])
    return None if style is None else Layout(begin, call, end, style)


def _schema_style(node: Mapping[str, Any]) -> Style | None:
    parser = node.get("x-parser")
    if parser == "gemma4-tool-call":
        return Style("literals", _GEMMA, _GEMMA)
    if parser == "json":
        return _json_style(node.get("x-parser-args") or {})
    if "x-regex-key-value" in node:
        more = node.get("additionalProperties")
        value = more if isinstance(more, dict) else {}
        parser = {"name": value.get("x-parser", "text"), "args": value.get("x-parser-args") or {}}
        return _tags(node["x-regex-key-value"], _reads_json(parser))
    return None


# ---- patterns


def _parts(pattern: str) -> Iterator[re.Match[str]]:
    """Yield the parts of a pattern; raise `FormatError` at one that is not understood."""
    at = 0
    while at < len(pattern):
        match = _PART.match(pattern, at)
        if match is None:
            raise FormatError(f"the pattern {pattern!r} is not understood")
        yield match
        at = match.end()


def _text_of(pattern: str, groups: Mapping[str, str]) -> str | None:
    """Return the shortest text of a pattern, with `groups` for the texts of its groups.

    The name "" is that of a group without a name; None is returned if a group is not in `groups`.

    Examples
    --------
    >>> _text_of(r"<call>\\s*<f=(?P<name>\\w+)>", {"name": "$name"})
    '<call>\\x00<f=$name>'
    """
    found = []
    for part in _parts(pattern):
        if part["group"] or part["plain"]:
            name = part["group"] or ""
            if name not in groups:
                return None
            found.append(groups[name])
        elif part["space"]:
            found.append(SPACE if part["space"].startswith(r"\s*") else " ")
        elif part["escape"]:
            found.append("\n" if part["escape"] == "n" else part["escape"])
        elif part["literal"]:
            found.append(part["literal"])
    return "".join(found)
