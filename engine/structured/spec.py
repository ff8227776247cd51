"""`StructuredOutput`: the format a request's text must match. Plain data; needs no library.

`engine.structured.grammar` compiles it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.checks import checked_text, items_of, shown, shown_with_type
from engine.errors import RequestError
from engine.signatures import checks_keywords

__all__ = [
    "MAX_CHOICES",
    "MAX_CHOICE_CHARS",
    "MAX_GRAMMAR_CHARS",
    "MAX_REGEX_CHARS",
    "MAX_SCHEMA_CHARS",
    "MAX_SCHEMA_DEPTH",
    "MAX_TAG_CHARS",
    "StructuredOutput",
    "structured_output_of",
]

MAX_SCHEMA_CHARS = 1 << 18
MAX_SCHEMA_DEPTH = 100  # nested objects and arrays; llguidance's own limit is 127
MAX_TAG_CHARS = 1 << 20
MAX_REGEX_CHARS = 1 << 14
MAX_GRAMMAR_CHARS = 1 << 16
MAX_CHOICES = 4096
MAX_CHOICE_CHARS = 1024

_TAG_DEPTH = 32  # levels of a structural tag around its schemas
_MAX_CHOICES_CHARS = 1 << 18  # maximum total characters of all choices


@checks_keywords
@dataclass(frozen=True, kw_only=True)
class StructuredOutput:
    """Format of a request's whole output text; set exactly one field.

    vLLM calls it `StructuredOutputsParams`, and formerly `GuidedDecodingParams` (with fields
    ``guided_json``, ``guided_regex``, ``guided_choice`` and ``guided_grammar``). Construction
    checks types and sizes; whether the schema, expression or grammar compiles is checked when the
    request is added.

    Attributes
    ----------
    json : str or dict, optional
        JSON schema; stored as text of at most `MAX_SCHEMA_CHARS`.
    regex : str, optional
        Regular expression in the syntax of Rust's regex library; it must match the whole text.
    choice : sequence of str, optional
        Texts to choose from; at most `MAX_CHOICES`.
    grammar : str, optional
        Context-free grammar in llguidance's variant of Lark; its first rule is ``start``.
    structural_tag : str or dict, optional
        Structural tag in XGrammar's format: literal text, free text and JSON in a sequence, between
        tags, or behind triggers. At most `MAX_TAG_CHARS` characters.
    json_object : bool
        Allow any JSON object.

    Raises
    ------
    RequestError
        If no field or several fields are set, or one has the wrong type or is too large.
    UnknownOptionError
        If a keyword is not one of the above.

    Examples
    --------
    >>> StructuredOutput(json={"type": "object"}).json
    '{"type":"object"}'
    >>> StructuredOutput(choice=["yes", "no"]).kind
    'choice'
    >>> StructuredOutput(choice=["yes"], regex="a|b")
    Traceback (most recent call last):
    ...
    engine.errors.RequestError: structured must have exactly one of json, regex, choice, grammar, \
structural_tag, json_object; got choice and regex
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    json_object: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.json_object, bool):
            got = shown_with_type(self.json_object)
            raise RequestError(f"json_object must be True or False; got {got}")
        given = [name for name in _NAMES if self._has(name)]
        if len(given) != 1:
            got = " and ".join(sorted(given)) or "none"
            names = ", ".join(_NAMES)
            raise RequestError(f"structured must have exactly one of {names}; got {got}")
        if self.kind in _CHECKS:
            value = _CHECKS[self.kind](getattr(self, self.kind))
            object.__setattr__(self, self.kind, value)

    @property
    def kind(self) -> str:
        """Name of the field that is set."""
        return next(name for name in _NAMES if self._has(name))

    def _has(self, name: str) -> bool:
        value = getattr(self, name)
        return value is not None and value is not False


_NAMES = tuple(field.name for field in dataclasses.fields(StructuredOutput))


def structured_output_of(value: object) -> StructuredOutput | None:
    """Convert `value`, a mapping of fields or a `StructuredOutput`, to a `StructuredOutput`.

    None stays None.

    Raises
    ------
    RequestError, UnknownOptionError
        If `value` is anything else, or its fields are invalid.
    """
    if value is None or isinstance(value, StructuredOutput):
        return value
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise RequestError(
            f"structured must be a StructuredOutput or a mapping; got {shown_with_type(value)}"
        )
    return StructuredOutput(**value)


def _text(name: str, value: object, max_chars: int) -> str:
    text = checked_text(name, value)
    if not 1 <= len(text) <= max_chars:
        raise RequestError(f"{name} must have 1 to {max_chars} characters; got {len(text)}")
    return text


def _choices(value: object) -> tuple[str, ...]:
    items = items_of("choice", value, "str", MAX_CHOICES)
    if not items:
        raise RequestError("choice must not be empty")
    texts = [_text(f"choice[{i}]", item, MAX_CHOICE_CHARS) for i, item in enumerate(items)]
    size = sum(map(len, texts))
    if size > _MAX_CHOICES_CHARS:
        raise RequestError(
            f"choice must have at most {_MAX_CHOICES_CHARS} characters in total; got {size}"
        )
    return tuple(dict.fromkeys(texts))


def _schema(value: object) -> str:
    """Return a schema as JSON, after checking its size and depth."""
    limits = MAX_SCHEMA_CHARS, MAX_SCHEMA_DEPTH
    text, schema = _checked_json("json", "a JSON schema", value, *limits)
    if not isinstance(schema, dict | bool):
        raise RequestError(f"json must be a JSON schema, an object; got {shown(text)}")
    return text


def _tag(value: object) -> str:
    """Return a structural tag as JSON, after checking its size and depth."""
    limits = MAX_TAG_CHARS, MAX_SCHEMA_DEPTH + _TAG_DEPTH
    text, tag = _checked_json("structural_tag", "a structural tag", value, *limits)
    if not isinstance(tag, dict):
        raise RequestError(f"structural_tag must be an object; got {shown(text)}")
    return text


def _checked_json(
    name: str, what: str, value: object, max_chars: int, most: int
) -> tuple[str, Any]:
    text = value if isinstance(value, str) else _dumped(name, value, max_chars)
    text = _text(name, text, max_chars)
    if (depth := _depth(text)) > most:
        raise RequestError(f"{name} must nest at most {most} objects and arrays; got {depth}")
    try:
        return text, json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{name} must be {what}; got {shown(text)} ({error})") from None


def _dumped(name: str, value: object, max_chars: int) -> str:
    """Return a dict as JSON; serialisation stops at `max_chars`."""
    if not isinstance(value, Mapping):
        raise RequestError(f"{name} must be a str or a dict; got {shown_with_type(value)}")
    encoder = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    parts = []
    size = 0
    try:
        for part in encoder.iterencode(dict(value)):
            parts.append(part)
            size += len(part)
            if size > max_chars:
                raise RequestError(f"{name} must have at most {max_chars} characters")
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(f"{name} must be JSON; it cannot be written ({error})") from None
    return "".join(parts)


def _depth(text: str) -> int:
    """Return the nesting depth of brackets in a JSON text, ignoring its strings."""
    depth = deepest = 0
    in_string = is_escaped = False
    for char in text:
        if in_string:
            in_string = is_escaped or char != '"'
            is_escaped = char == "\\" and not is_escaped
        elif char == '"':
            in_string = True
        elif char in "{[":
            depth += 1
            deepest = max(deepest, depth)
        elif char in "}]":
            depth -= 1
    return deepest


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


_CHECKS: dict[str, Callable[[object], Any]] = {
    "json": _schema,
    "regex": lambda value: _text("regex", value, MAX_REGEX_CHARS),
    "choice": _choices,
    "grammar": lambda value: _text("grammar", value, MAX_GRAMMAR_CHARS),
    "structural_tag": _tag,
}
