"""`ResponseSchema`: reads an answer by a ``response_schema``, the older form of a template.

A node of a schema reads the text, or the match of its parent's pattern, and may have ``x-regex``
(the match, its group or its named groups), ``x-regex-iterator`` (a list of matches),
``x-regex-key-value`` (an object), ``x-regex-substitutions`` and ``x-parser``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from engine.server.response_template.contents import FormatError, lax_json

__all__ = ["ResponseSchema"]

_MAX_DEPTH = 32
_GEMMA = {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]}
_TOKEN = re.compile(r"\s*(\[\*\]|'[^']*'|[A-Za-z_]\w*|[@{}:,.])\s*")


class ResponseSchema:
    """A response schema whose patterns are compiled.

    Parameters
    ----------
    spec : mapping

    Raises
    ------
    FormatError
        If it is invalid.
    """

    def __init__(self, spec: Mapping[str, Any]) -> None:
        if not isinstance(spec.get("properties"), dict):
            raise FormatError("properties must be an object")
        self._spec = spec
        self._patterns: dict[str, re.Pattern[str]] = {}
        self._check(spec, 0)

    def begun(self, prompt: str) -> str:
        """Return the part of the prompt that belongs to the message: none is declared."""
        return ""

    def message(self, text: str, check: Callable[[str, Any], None]) -> dict[str, Any]:
        """Return the fields of a message.

        Parameters
        ----------
        text : str
        check : callable
            Takes a field's name and its value; raises FormatError if it cannot be used.

        Raises
        ------
        FormatError
            If the text does not match, or is not what the schema says.
        """
        found = self._read(self._spec, text)
        if not isinstance(found, dict):
            raise FormatError("the answer does not match the schema")
        for name, value in found.items():
            check(name, value)
        return {key: value for key, value in found.items() if value is not None}

    def _check(self, node: Any, depth: int) -> None:
        """Compile the patterns of a node and those in it."""
        if depth > _MAX_DEPTH:
            raise FormatError(f"a schema must have at most {_MAX_DEPTH} levels")
        if isinstance(node, list):
            for one in node:
                self._check(one, depth + 1)
        if not isinstance(node, dict):
            return
        sources = [node[key] for key in _PATTERNS if key in node]
        sources += [pair[0] for pair in node.get("x-regex-substitutions") or []]
        for source in sources:
            try:
                self._patterns[source] = re.compile(source, re.DOTALL)
            except (re.error, TypeError, RecursionError, OverflowError) as error:
                raise FormatError(f"a pattern is invalid ({error})") from None
        if (parser := node.get("x-parser")) is not None and parser not in _PARSERS:
            raise FormatError(f"x-parser must be one of {', '.join(_PARSERS)}; got {parser!r}")
        for key, value in node.items():
            if not key.startswith("x-"):
                self._check(value, depth + 1)

    def _read(self, node: Any, content: Any) -> Any:
        if not isinstance(node, dict):  # True allows any value.
            return content
        if "const" in node:
            return node["const"]
        if isinstance(content, str):
            content = self._matched(node, content)
        if isinstance(content, str) and (parser := node.get("x-parser")) is not None:
            args = node.get("x-parser-args") or {}
            content = _PARSERS[parser](content, args)
            if "transform" in args:
                content = _Query(args["transform"]).search(content)
        if content is None:
            return node.get("default")
        return self._typed(node, content)

    def _matched(self, node: dict[str, Any], text: str) -> Any:
        """Return what a node's patterns find in a text; None if they do not match."""
        for pattern, replacement in node.get("x-regex-substitutions") or []:
            text = self._patterns[pattern].sub(replacement, text)
        if "x-regex" in node:
            match = self._patterns[node["x-regex"]].search(text)
            content = None if match is None else _found(match)
            if not isinstance(content, str):
                return content
            text = content
        if "x-regex-iterator" in node:
            every = self._patterns[node["x-regex-iterator"]].finditer(text)
            return [_found(match) for match in every] or None
        if "x-regex-key-value" in node:
            every = self._patterns[node["x-regex-key-value"]].finditer(text)
            return {match["key"]: match["value"] for match in every} or None
        return text

    def _typed(self, node: dict[str, Any], content: Any) -> Any:
        """Return content as a node's type says."""
        properties = node.get("properties") or {}
        kind = node.get("type") or ("object" if properties else None)
        if kind == "object" and isinstance(content, str) and properties:
            return {key: self._read(child, content) for key, child in properties.items()}
        if kind == "object" and isinstance(content, dict):
            more = node.get("additionalProperties", True)
            found = {k: self._read(properties.get(k, more), v) for k, v in content.items()}
            absent = ((k, self._read(child, None)) for k, child in properties.items())
            return found | {k: value for k, value in absent if k not in found and value is not None}
        if kind == "array" and isinstance(content, list):
            return [self._read(node.get("items", True), one) for one in content]
        if kind in _SCALARS and isinstance(content, str):
            try:
                return _SCALARS[kind](content)
            except ValueError:
                raise FormatError(f"no {kind}: {content[:40]!r}") from None
        if kind in ("object", "array"):
            raise FormatError(f"no {kind}: {type(content).__name__}")
        return content


_PATTERNS = ("x-regex", "x-regex-iterator", "x-regex-key-value")
_PARSERS: dict[str, Callable[[str, Mapping[str, Any]], Any]] = {
    "json": lax_json,
    "gemma4-tool-call": lambda text, _: lax_json(text, _GEMMA),
}
_SCALARS: dict[str, Callable[[str], Any]] = {
    "integer": int,
    "number": float,
    "boolean": lambda text: text.lower() in ("true", "1"),
}


def _found(match: re.Match[str]) -> Any:
    """Return a match's named groups, its only group, or its text."""
    if named := match.groupdict():
        return {name: text for name, text in named.items() if text is not None}
    groups = match.groups()
    if len(groups) > 1:
        raise FormatError("a pattern must have one group, or named ones")
    return groups[0] if groups else match[0]


class _Query:
    """A query of JMESPath's simplest kind: ``@``, names, literals, objects, and ``[*]``.

    Examples
    --------
    >>> _Query("{type: 'function', function: @}").search({"name": "f"})
    {'type': 'function', 'function': {'name': 'f'}}
    >>> _Query("[*].{name: a.b}").search([{"a": {"b": 1}}])
    [{'name': 1}]
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens: list[str] = []
        at = 0
        while match := _TOKEN.match(text, at):
            self._tokens.append(match[1])
            at = match.end()
        if at < len(text):
            raise FormatError(f"transform is not supported: {text!r}")
        self._at = 0

    def search(self, value: Any) -> Any:
        """Return what the query finds."""
        self._at = 0
        found = self._expression(value, 0)
        if self._at < len(self._tokens):
            raise FormatError(f"transform is not supported: {self._text!r}")
        return found

    def _next(self, *expected: str) -> str:
        token = self._tokens[self._at] if self._at < len(self._tokens) else ""
        if not token or (expected and token not in expected):
            raise FormatError(f"transform is not supported: {self._text!r}")
        self._at += 1
        return token

    def _expression(self, value: Any, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise FormatError(f"transform must have at most {_MAX_DEPTH} levels")
        token = self._next()
        if token == "[*]":
            if self._at == len(self._tokens):
                return value
            self._next(".")
            begin = self._at
            found = []
            for one in value if isinstance(value, list) else []:
                self._at = begin
                found.append(self._expression(one, depth + 1))
            if not found:
                self._at = len(self._tokens)
            return found
        if token == "{":
            value = self._object(value, depth)
        elif token.startswith("'"):
            return token[1:-1]
        elif token != "@":
            value = value.get(token) if isinstance(value, dict) else None
        if self._at < len(self._tokens) and self._tokens[self._at] == ".":
            self._at += 1
            return self._expression(value, depth + 1)
        return value

    def _object(self, value: Any, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while True:
            name = self._next()
            self._next(":")
            found[name.strip("'")] = self._expression(value, depth + 1)
            if self._next(",", "}") == "}":
                return found
