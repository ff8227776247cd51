"""Grammars of tool calls in a model's own format, as structural tags.

Each family of readers describes its calls as `Section`s, and `CallGrammar` combines them. See
`engine.structured.structural_tag` for the formats.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine.server.tool_parsers._parser import MAX_CALLS
from engine.structured.lark import containing
from engine.structured.references import OWN_DOCUMENT
from engine.structured.tag_forms import Form, choice, const, sequence

__all__ = [
    "CallFormat",
    "CallGrammar",
    "Form",
    "Function",
    "Section",
    "choice",
    "const",
    "filled",
    "json_arguments",
    "listed",
    "sequence",
]

_FIELD = re.compile(r"\$(name|arguments|index)")
_INDEX: Form = {"type": "regex", "pattern": "[0-9]{1,3}"}


@dataclass(frozen=True)
class Function:
    """A function that an answer may call.

    Attributes
    ----------
    name : str
    parameters : mapping
        JSON schema of the arguments.
    where : str
        Its place in the request, for messages.
    is_strict : bool
        Whether the arguments follow the schema; otherwise they are any object.
    """

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    where: str = "parameters"
    is_strict: bool = True

    @property
    def schema(self) -> Form:
        """Schema of the arguments, as a document of its own."""
        if not self.is_strict:
            return {"type": "object"}
        return {"title": self.where, "type": "object", OWN_DOCUMENT: self.parameters}


@dataclass(frozen=True)
class Section:
    """How a format writes calls: ``begin bracket {call separator call ...} end``.

    Attributes
    ----------
    begin : str
        Text that begins a section of calls, and nothing else unless the section has `firsts`.
    call : Form
        One call.
    end : str
        Text that ends the section.
    bracket : str
        Text between `begin` and the first call.
    separator : Form or None
        Separator of the calls of a section; None if each call has a section of its own.
    between : str
        Text between two sections.
    several : Form or None
        Replaces `call` if several calls are allowed; None: `call` serves both cases.
    starts_line : bool
        Whether `begin` counts at the start of a line only.
    firsts : tuple of (str, Form)
        For a `begin` that other text has too: for each function, how its call begins and how it
        goes on. Only with one of these behind it does `begin` begin a section.
    excludes : tuple of str
        Expressions of texts in which the reader would find a call: none may stand beside the calls.
    """

    begin: str
    call: Form
    end: str = ""
    bracket: str = ""
    separator: Form | None = None
    between: str = "\n"
    several: Form | None = None
    starts_line: bool = False
    firsts: tuple[tuple[str, Form], ...] = ()
    excludes: tuple[str, ...] = ()

    def form(self, *, one_call: bool) -> Form:
        """Return the whole section."""
        begun = [sequence(const(b), form) for b, form in self.beginnings(one_call=one_call)]
        return sequence(choice(begun), self.rest(one_call=one_call))

    def beginnings(self, *, one_call: bool) -> list[tuple[str, Form]]:
        """Return the texts that begin a section, each with the format behind it, up to `rest`."""
        if self.firsts:
            return [(f"{self.begin}{begin}", form) for begin, form in self.firsts]
        call = self.call if one_call or self.several is None else self.several
        calls = listed(call, self.separator, one_call=one_call)
        return [(self.begin, sequence(const(self.bracket), calls))]

    def rest(self, *, one_call: bool) -> Form:
        """Return the format of the end, after further calls if the first one is in `firsts`."""
        if not self.firsts or self.separator is None or one_call:
            return const(self.end)
        more = sequence(self.separator, listed(self.call, self.separator, one_call=False))
        return sequence({"type": "optional", "content": more}, const(self.end))


def listed(call: Form, separator: Form | None, *, one_call: bool) -> Form:
    """Return the format of calls with a separator between them; None: of one call."""
    if one_call or separator is None:
        return call
    return {"type": "list", "content": call, "separator": separator, "max": MAX_CALLS}


def json_arguments(function: Function) -> Form:
    """Return the format of a function's arguments as JSON."""
    return {"type": "json_schema", "json_schema": function.schema, "any_whitespace": False}


def filled(template: str, function: Function, arguments: Form | None = None) -> Form:
    """Return the format of a template of a call, with "$name", "$arguments" and "$index".

    Examples
    --------
    >>> form = filled("f:$name:$index", Function("add"))
    >>> [one.get("value") for one in form["elements"]]
    ['f:', 'add', ':', None]
    """
    parts = []
    at = 0
    for match in _FIELD.finditer(template):
        parts.append(const(template[at : match.start()]))
        if match[1] == "name":
            parts.append(const(function.name))
        elif match[1] == "index":
            parts.append(_INDEX)
        else:
            parts.append(json_arguments(function) if arguments is None else arguments)
        at = match.end()
    return sequence(*parts, const(template[at:]))


class CallFormat(Protocol):
    """Grammar of the calls of some functions in one format."""

    def required(self, *, one_call: bool) -> Form:
        """Return the format of an answer of one or several calls and nothing else."""

    def within_text(self, *, one_call: bool, excludes: Sequence[str] = ()) -> Form:
        """Return the format of text in which each section of calls is complete.

        Parameters
        ----------
        one_call : bool
            Whether the answer ends with the first call.
        excludes : sequence of str
            Expressions of what no text before or between calls may be.
        """


class CallGrammar:
    """`CallFormat` of calls in sections.

    Parameters
    ----------
    sections : sequence of Section
        Ways in which an answer may write calls; the first is that of required calls.
    """

    def __init__(self, *sections: Section) -> None:
        self._sections = sections

    def required(self, *, one_call: bool) -> Form:
        """Return the format of an answer of one or several calls and nothing else."""
        section = self._sections[0]
        first = section.form(one_call=one_call)
        if one_call or section.separator is not None:
            return first
        return listed(first, const(section.between), one_call=False)

    def within_text(self, *, one_call: bool, excludes: Sequence[str] = ()) -> Form:
        """Return the format of text with calls; see `CallFormat`."""
        excluded = [*excludes, *(text for one in self._sections for text in one.excludes)]
        begins: list[str] = []
        found: list[Form] = []
        for section in self._sections:
            line_break = "\n" if section.starts_line else ""
            tags = [
                {"begin": f"{line_break}{begin}", "content": form, "end": ""}
                for begin, form in section.beginnings(one_call=one_call)
            ]
            triggers = list(dict.fromkeys(str(tag["begin"]) for tag in tags))
            begins += triggers
            text_and_call = {
                "type": "triggered_tags",
                "triggers": triggers,
                "tags": tags,
                "at_least_one": True,
                "stop_after_first": True,
                "excludes": excluded,
            }
            found.append(sequence(text_and_call, section.rest(one_call=one_call)))
        plain = {"type": "any_text", "excludes": [*excluded, *map(containing, begins)]}
        at_start = [one.form(one_call=one_call) for one in self._sections if one.starts_line]
        if one_call:
            return choice([*at_start, plain, *found])
        start = [{"type": "optional", "content": choice(at_start)}] if at_start else []
        return sequence(*start, {"type": "star", "content": choice(found)}, plain)
