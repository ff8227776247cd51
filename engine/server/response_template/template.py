"""`ResponseTemplate`: reads an answer by a checkpoint's ``response_template``.

The template names the fields of a message and, for each, what opens and closes its region in the
text, how the region is read, and a template of the result. The field without an opening is the text
between the regions. See "Response Parsing" in the documentation of transformers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from engine.server.response_template.contents import CONTENTS, FormatError, content_of, transformed

__all__ = ["ResponseTemplate"]

_MAX_REGIONS = 4096  # regions of an answer
_CONTENT = "content"
_DELIMITERS = ("open", "open_pattern", "close", "close_pattern")
_KEYS = frozenset(
    (*_DELIMITERS, "content", "content_args", "repeats", "optional", "join", "transform")
) | {"transform_each"}


@dataclass(frozen=True)
class _Field:
    name: str
    spec: Mapping[str, Any]
    opening: re.Pattern[str] | None
    closing: re.Pattern[str] | None

    @property
    def is_text(self) -> bool:
        return self.spec.get("content", "text") == "text" and "transform" not in self.spec

    def value(self, body: str, groups: Mapping[str, str]) -> Any:
        """Return what the text of a region means."""
        name = self.spec.get("content", "text")
        value = content_of(body, name, self.spec.get("content_args") or {})
        if "transform" not in self.spec:
            return value
        if not self.spec.get("transform_each"):
            return transformed(self.spec["transform"], {**groups, "content": value})
        if not isinstance(value, list):
            raise FormatError(f"{self.name}: transform_each needs a list")
        items = (
            {**groups, **(one if isinstance(one, dict) else {}), "content": one} for one in value
        )
        return [transformed(self.spec["transform"], item) for item in items]


@dataclass(frozen=True)
class _Region:
    """A region of a text, and the delimiters around it."""

    field: _Field
    body: str
    opened_by: re.Match[str] | None
    closed_by: re.Match[str] | None

    @property
    def groups(self) -> dict[str, str]:
        """Texts of the named groups of the delimiters' patterns."""
        found: dict[str, str] = {}
        for match in (self.opened_by, self.closed_by):
            given = {} if match is None else match.groupdict()
            found |= {name: text for name, text in given.items() if text is not None}
        return found

    @property
    def source(self) -> str:
        """The region's text with its delimiters."""
        begin = "" if self.opened_by is None else self.opened_by[0]
        return begin + self.body + ("" if self.closed_by is None else self.closed_by[0])


class ResponseTemplate:
    """A response template whose patterns are compiled.

    Parameters
    ----------
    spec : mapping

    Raises
    ------
    FormatError
        If it is invalid.
    """

    def __init__(self, spec: Mapping[str, Any]) -> None:
        fields = spec.get("fields")
        if not isinstance(fields, dict) or not fields:
            raise FormatError("fields must be an object with at least one field")
        self._fields = [self._field(name, field) for name, field in fields.items()]
        implicit = [field for field in self._fields if field.opening is None]
        if len(implicit) > 1:
            names = ", ".join(field.name for field in implicit)
            raise FormatError(f"one field at most may lack an opening; got {names}")
        self._implicit = implicit[0] if implicit else None
        self._anchor = _pattern(spec, "start_anchor", "start_anchor_pattern")

    def _field(self, name: str, spec: Any) -> _Field:
        if not isinstance(spec, dict):
            raise FormatError(f"field {name} must be an object; got {type(spec).__name__}")
        if unknown := spec.keys() - _KEYS:
            raise FormatError(f"field {name} has unknown keys: {', '.join(sorted(unknown))}")
        if spec.get("content", "text") not in CONTENTS:
            known = ", ".join(CONTENTS)
            raise FormatError(f"content of {name} must be one of {known}; got {spec['content']!r}")
        opening = _pattern(spec, "open", "open_pattern")
        return _Field(name, spec, opening, _pattern(spec, "close", "close_pattern"))

    def begun(self, prompt: str) -> str:
        """Return the part of the prompt that belongs to the message that it has begun."""
        if self._anchor is None:
            return ""
        end = None
        for match in self._anchor.finditer(prompt):
            end = match.end()
        return "" if end is None else prompt[end:]

    def message(self, text: str, check: Callable[[str, Any], None]) -> dict[str, Any]:
        """Return the fields of a message.

        A region that is not what its field says is part of the content, unchanged.

        Parameters
        ----------
        text : str
        check : callable
            Takes a field's name and a value of it; raises FormatError if it cannot be used.

        Raises
        ------
        FormatError
            If a field is missing or a text cannot be read.
        """
        found: dict[str, Any] = {}
        bodies: dict[str, list[str]] = {}
        for region in self._regions(text):
            field = region.field
            if field.is_text and not field.spec.get("repeats") and "join" not in field.spec:
                bodies.setdefault(field.name, []).append(region.body)
                continue
            try:
                value = field.value(region.body, region.groups)
                check(field.name, value)
            except FormatError:
                if field.name == _CONTENT:
                    raise
                bodies.setdefault(_CONTENT, []).append(region.source)
                continue
            self._add(found, field, value)
        for field in self._fields:
            if field.name in bodies:  # text in several parts, between regions
                self._add(found, field, field.value("".join(bodies.pop(field.name)), {}))
            if not field.spec.get("optional", True) and field.name not in found:
                raise FormatError(f"the answer has no {field.name}")
        return found | {name: "".join(parts) for name, parts in bodies.items()}

    def _add(self, found: dict[str, Any], field: _Field, value: Any) -> None:
        if "join" in field.spec:
            before = [found[field.name]] if field.name in found else []
            found[field.name] = str(field.spec["join"]).join([*before, str(value)])
        elif field.spec.get("repeats"):
            found.setdefault(field.name, []).append(value)
        else:
            found[field.name] = value

    def _regions(self, text: str) -> Iterator[_Region]:
        """Yield the regions of a text."""
        search = _Search(text)
        current = self._implicit
        opened_by: re.Match[str] | None = None
        at = 0
        for _ in range(_MAX_REGIONS):
            match, opened = self._next(search, current, at)
            body = text[at : match.start() if match else None]
            if current is not None and (body or current is not self._implicit):
                closed_by = None if opened is not None else match
                yield _Region(current, body, opened_by, closed_by)
            if match is None:
                return
            if match.end() == at and opened is None and current is self._implicit:
                return  # an empty end at an empty region
            current = self._implicit if opened is None else opened
            opened_by = None if opened is None else match
            at = match.end()
        raise FormatError(f"an answer has at most {_MAX_REGIONS} regions")

    def _next(
        self, search: _Search, current: _Field | None, at: int
    ) -> tuple[re.Match[str] | None, _Field | None]:
        """Return the next delimiter that counts in this region, and the field that it opens."""
        watched: list[tuple[re.Pattern[str], _Field | None]] = []
        if current is not None and current.closing is not None:
            watched.append((current.closing, None))
        if current is self._implicit:
            openings = [f for f in self._fields if f.opening is not None]
            watched = [*((f.opening, f) for f in openings if f.opening), *watched]
        best: tuple[re.Match[str] | None, _Field | None] = (None, None)
        for pattern, field in watched:
            match = search.find(pattern, at)
            if match is None:
                continue
            key = (match.start(), -len(match[0]))
            if best[0] is None or key < (best[0].start(), -len(best[0][0])):
                best = (match, field)
        return best


class _Search:
    """Searches a text for patterns, and keeps the next match of each."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._found: dict[re.Pattern[str], re.Match[str] | None] = {}

    def find(self, pattern: re.Pattern[str], at: int) -> re.Match[str] | None:
        if pattern in self._found:
            kept = self._found[pattern]
            if kept is None or kept.start() >= at:
                return kept
        self._found[pattern] = pattern.search(self._text, at)
        return self._found[pattern]


def _pattern(spec: Mapping[str, Any], literal: str, pattern: str) -> re.Pattern[str] | None:
    """Compile a delimiter: one text, one of several, or a pattern; "eos" is the text's end."""
    if literal in spec and pattern in spec:
        raise FormatError(f"{literal} excludes {pattern}; got both")
    if (source := spec.get(pattern)) is not None:
        try:
            return re.compile(source, re.DOTALL)
        except (re.error, TypeError, RecursionError, OverflowError) as error:
            raise FormatError(f"{pattern} is invalid ({error})") from None
    given = spec.get(literal)
    texts = [given] if isinstance(given, str) else given
    if texts is None or texts == ["eos"]:
        return None
    if not isinstance(texts, list) or not all(isinstance(one, str) and one for one in texts):
        raise FormatError(f"{literal} must be a text or texts; got {given!r}")
    return re.compile("|".join(re.escape(one) for one in sorted(texts, key=len, reverse=True)))
