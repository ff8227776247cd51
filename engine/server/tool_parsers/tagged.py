"""Tool calls whose values are text between tags, as Qwen3-Coder and GLM-4.5 write them.

A row of `Tags` describes a format. Values have no type of their own: the schema of the function's
parameters says what a text means. Text parameters are streamed, others when they are complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.server.markers import Markers
from engine.server.tool_parsers._parser import MAX_CALLS, StateParser
from engine.server.tool_parsers.call_grammar import (
    CallGrammar,
    Form,
    Function,
    Section,
    choice,
    const,
    filled,
    sequence,
)
from engine.server.tool_parsers.call_reader import is_tool_name
from engine.server.tool_parsers.events import ToolCallStart, random_id
from engine.server.tool_parsers.state_reader import StateReader
from engine.server.tool_parsers.typed_values import TEXT, allowed_types, typed_json

__all__ = ["TaggedParser", "Tags", "tagged_calls"]

_MAX_HEAD_CHARS = 400
_SPACE = re.compile(r"\s*")
_NEWLINE: Form = {"type": "optional", "content": const("\n")}


@dataclass(frozen=True)
class Tags:
    """Tags of one format: ``section[0] call NAME end {key KEY value TEXT close}* done section[1]``.

    Attributes
    ----------
    section : (str, str)
        Around one or several calls; empty if there is nothing around them.
    call : str
        Before a function's name.
    name_ends : tuple of str
        What ends the name. A tag that begins the next part stays.
    name : re.Pattern
        What matches the text between; group 1 is the name.
    key : str
        Before a parameter's name.
    value : str
        Between it and the value.
    key_name : re.Pattern
        What matches the text between `key` and `value`; group 1 is the name. An optional second
        group is "true" if the value is text, and "false" if it is JSON.
    close, done : str
        After a value, and after a call.
    trims : bool
        Whether a value's first and last line break are not part of it.
    is_bare : bool
        Whether a call may stand without its section.
    is_single : bool
        Whether each call is written in a section of its own.
    written_name, written_key : str
        How the text from `call` to the end of the name is written, with "$name"; and the text from
        `key` to the value, with "{key}".
    written_key_of_json : str or None
        The same before values other than text, if it differs.
    """

    section: tuple[str, str]
    call: str
    name_ends: tuple[str, ...]
    key: str
    value: str
    close: str
    done: str
    name: re.Pattern[str] = re.compile(r"\s*(.+?)\s*")
    key_name: re.Pattern[str] = re.compile(r"\s*(.+?)\s*", re.DOTALL)
    trims: bool = False
    is_bare: bool = False
    is_single: bool = False
    written_name: str = "$name>"
    written_key: str = "{key}>"
    written_key_of_json: str | None = None


def tagged_calls(tags: Tags, functions: Sequence[Function]) -> CallGrammar:
    """Return the grammar of calls of the functions."""
    call = choice([_written_call(tags, function) for function in functions])
    bare = Section(tags.call, call)
    if not tags.section[0]:
        return CallGrammar(bare)
    begun = sequence(_NEWLINE, const(tags.call), call, _NEWLINE)
    separator = None if tags.is_single else const("")
    section = Section(tags.section[0], begun, tags.section[1], separator=separator)
    return CallGrammar(section, bare) if tags.is_bare else CallGrammar(section)


def _written_call(tags: Tags, function: Function) -> Form:
    """Return the format of a call behind `Tags.call`."""
    line_break = "\n" if tags.trims else ""
    of_json = tags.written_key_of_json
    properties = function.parameters.get("properties")
    types = {
        name: sorted(allowed_types(schema, function.parameters))
        for name, schema in (properties if isinstance(properties, Mapping) else {}).items()
    }
    values = {
        "type": "tagged_values",
        "json_schema": function.schema,
        "begin": f"{tags.key}{tags.written_key}{line_break}",
        "begin_json": None if of_json is None else f"{tags.key}{of_json}{line_break}",
        "end": f"{line_break}{tags.close}",
        "close": tags.close,
        "types": types,
        "repeats_others": not function.is_strict,
    }
    head = filled(tags.written_name, function)
    return sequence(head, _NEWLINE, values, const(tags.done))


class TaggedParser(StateParser):
    """Reads the calls of one format.

    Parameters
    ----------
    tags : Tags
    names : collection of str, optional
        Functions that may be called, preferably a mapping to the schemas of their parameters.
    make_id : callable, optional
        Returns an id for a new call.
    """

    def __init__(
        self,
        tags: Tags,
        names: Collection[str] | None = None,
        make_id: Callable[[], str] = random_id,
    ) -> None:
        super().__init__(names, make_id)
        self._tags = tags
        starts = [tags.section[0]] if tags.section[0] else []
        if tags.is_bare or not starts:
            starts.append(tags.call)
        self._starts = Markers(*starts)
        self._ends = Markers(*tags.name_ends)
        self._head = ""  # text behind `call` so far
        self.markers = tuple(
            filter(None, (*tags.section, tags.call, tags.key, tags.value, tags.close, tags.done))
        )

    def _in_text(self, text: str, at: int, is_last: bool) -> int:
        found, marker = self._starts.find(text, at, is_last)
        self._text(text[at:found])
        if marker is None:
            return found
        self._hold(marker)
        if self._num_calls >= MAX_CALLS:
            self._give_back()
        elif marker == self._tags.call:
            self._head = ""
            self._state = self._in_name
        else:
            self._state = self._in_section
        return found + len(marker)

    def _in_section(self, text: str, at: int, is_last: bool) -> int:
        """Read the next call of a section, or its end."""
        at = self._skip_space(text, at)
        end = self._tags.section[1]
        call = self._tags.call
        rest = text[at : at + max(len(end), len(call))]
        if end and rest.startswith(end):
            self._held.clear()
            self._state = self._in_text
            return at + len(end)
        if rest.startswith(call) and self._num_calls < MAX_CALLS:
            self._hold(call)
            self._head = ""
            self._state = self._in_name
            return at + len(call)
        if not rest or (not is_last and (end.startswith(rest) or call.startswith(rest))):
            return at
        follows_call = not "".join(self._held).strip()
        if is_last and follows_call and end.startswith(rest):  # a closing tag that was cut
            return len(text)
        self._fail()
        return at

    def _in_name(self, text: str, at: int, is_last: bool) -> int:
        found, marker = self._ends.find(text, at, is_last)
        # What follows a name that is too long is read as text, however much of it has arrived.
        found = min(found, at + _MAX_HEAD_CHARS + 1 - len(self._head))
        self._hold(text[at:found])
        self._head += text[at:found]
        if len(self._head) > _MAX_HEAD_CHARS:
            self._fail()
            return found
        if marker is None:
            return found
        if not self._head.strip() and not marker.strip():  # a line break before the name
            self._hold(marker)
            self._head += marker
            return found + len(marker)
        match = self._tags.name.fullmatch(self._head)
        if match is None or not is_tool_name(match[1], self._names):
            self._fail()
            return found
        stays = marker in (self._tags.key, self._tags.done)
        source = self._take_held() + ("" if stays else marker)
        start = ToolCallStart(self._num_calls, self._make_id(), match[1], source)
        self._begin_call(_Reader(self._tags, start, self._schema_of(match[1])))
        return found if stays else found + len(marker)

    def _end_call(self) -> None:
        self._state = self._in_section if self._tags.section[0] else self._in_text


class _Reader(StateReader):
    """Reads a call behind its name."""

    def __init__(self, tags: Tags, start: ToolCallStart, schema: Mapping[str, Any] | None) -> None:
        super().__init__(start)
        self._tags = tags
        self._schema = schema or {}
        self._keys: set[str] = set()
        self._types = TEXT  # of the current value
        self._value: list[str] | None = None  # parts of a value that is not streamed
        self._is_first = True  # whether the value has no text yet
        self._newline = ""  # a line break that may be the value's last
        self._close = Markers(tags.close)
        self._value_tag = Markers(tags.value)

    def _first(self, text: str, at: int) -> int:
        self._begin()
        self._state = self._between
        return at

    def _between(self, text: str, at: int) -> int:
        """Read the next parameter's tag, or the end of the call."""
        at = _SPACE.match(text, at).end()  # type: ignore[union-attr]
        rest = text[at : at + max(len(self._tags.key), len(self._tags.done))]
        if rest.startswith(self._tags.key):
            self._state = self._in_key
            return at + len(self._tags.key)
        if rest.startswith(self._tags.done):
            self._write("}" if self._keys else "{}")
            self._end()
            return at + len(self._tags.done)
        if rest and not self._tags.key.startswith(rest) and not self._tags.done.startswith(rest):
            self._fail()
        return at

    def _in_key(self, text: str, at: int) -> int:
        found, marker = self._value_tag.find(text, at, False)
        if found - at > _MAX_HEAD_CHARS:
            self._fail()
            return at
        if marker is None:
            return at
        match = self._tags.key_name.fullmatch(text[at:found])
        if match is None or match[1] in self._keys:
            self._fail()
            return found
        self._begin_value(match)
        return found + len(marker)

    def _begin_value(self, match: re.Match[str]) -> None:
        key = match[1]
        says_text = match[2] if self._tags.key_name.groups > 1 else None
        properties = self._schema.get("properties")
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        self._types = TEXT if says_text == "true" else allowed_types(schema, self._schema)
        if says_text == "false":
            self._types = self._types - TEXT
        self._write(("{" if not self._keys else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        self._keys.add(key)
        self._value = None if self._types == TEXT else []
        if self._value is None:
            self._write('"')
        self._is_first = True
        self._newline = ""
        self._state = self._in_value

    def _in_value(self, text: str, at: int) -> int:
        found, marker = self._close.find(text, at, False)
        self._take(text[at:found], is_last=marker is not None)
        if marker is None:
            return found
        if self._value is None:
            self._write('"')
        else:
            self._write(typed_json("".join(self._value), self._types))
        self._state = self._between
        return found + len(marker)

    def _take(self, piece: str, *, is_last: bool) -> None:
        """Take a part of the value."""
        if self._tags.trims:
            if self._is_first and piece:
                piece = piece.removeprefix("\n")
                self._is_first = False
            piece = self._newline + piece
            self._newline = "\n" if piece.endswith("\n") else ""
            piece = piece.removesuffix("\n")
        if self._value is not None:
            self._value.append(piece)
        elif piece:
            self._write(json.dumps(piece, ensure_ascii=False)[1:-1])
