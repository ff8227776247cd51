"""Streaming of answers by a response template whose delimiters are texts, not patterns.

Text of the reasoning and the content is passed on as it arrives. Any other region is read by the
worker when it ends: it is calls, something that is left out, or else content.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from engine.server.markers import Markers, TextGate
from engine.server.response_template.readers import Parsed, call_events
from engine.server.response_template.worker import KINDS, THOUGHTS
from engine.server.tool_parsers import MAX_CALLS, Event, TextDelta, random_id

__all__ = ["Regions", "StreamedReasoning", "StreamedTools", "texts_of"]

_CONTENT = "content"
_PATTERNS = ("open_pattern", "close_pattern")
_RESHAPED = ("transform", "repeats", "join")


@dataclass(frozen=True)
class _Field:
    name: str
    opening: tuple[str, ...]
    closing: tuple[str, ...]
    is_text: bool
    strips: bool


class Regions:
    """The fields of a template that can be streamed.

    Attributes
    ----------
    implicit : _Field or None
        The field of the text between the others.
    fields : tuple of _Field
        The others.
    anchors : tuple of str
        Texts of a prompt behind which the model's message begins.
    strips_content : bool
        Whether white space is dropped at both ends of the content.
    """

    def __init__(
        self, implicit: _Field | None, fields: tuple[_Field, ...], anchors: tuple[str, ...]
    ) -> None:
        self.implicit = implicit
        self.fields = fields
        self.anchors = anchors
        contents = (one for one in (implicit, *fields) if one is not None and one.name == _CONTENT)
        self.strips_content = any(one.strips for one in contents)

    @classmethod
    def of(cls, kind: str, spec: Mapping[str, Any]) -> Regions | None:
        """Return the regions of a valid template, or None if it cannot be streamed."""
        if kind != KINDS[0] or "start_anchor_pattern" in spec:
            return None
        fields = [_field(name, field) for name, field in spec["fields"].items()]
        found = [field for field in fields if field is not None]
        num_thoughts = sum(field.name in THOUGHTS for field in found)
        if len(found) < len(fields) or num_thoughts > 1:  # an answer has one reasoning
            return None
        explicit = tuple(field for field in found if field.opening)
        implicit = next((field for field in found if not field.opening), None)
        regions = cls(implicit, explicit, texts_of(spec.get("start_anchor")))
        watched = [*(field.closing for field in found), regions.watched(implicit)]
        return regions if all(map(_are_distinct, watched)) else None

    def watched(self, current: _Field | None) -> tuple[str, ...]:
        """Return the delimiters that count in a field."""
        if current is not self.implicit:
            return current.closing if current is not None else ()
        openings = tuple(mark for field in self.fields for mark in field.opening)
        return openings + (current.closing if current is not None else ())

    def begun(self, prompt: str) -> str:
        """Return the part of the prompt that belongs to the message that it has begun."""
        ends = (prompt.rfind(anchor) + len(anchor) for anchor in self.anchors if anchor in prompt)
        end = max(ends, default=len(prompt))
        return prompt[end:]


def _field(name: str, spec: Mapping[str, Any]) -> _Field | None:
    """Return a field, or None if it cannot be streamed."""
    is_text = spec.get("content", "text") == "text" and not any(map(spec.get, _RESHAPED))
    is_spoken = name == _CONTENT or name in THOUGHTS
    has_pattern = any(key in spec for key in _PATTERNS)
    opening = texts_of(spec.get("open"))
    if has_pattern or not spec.get("optional", True) or (is_spoken and not is_text):
        return None
    if not opening and not is_text:
        return None
    strips = (spec.get("content_args") or {}).get("strip", True)
    return _Field(name, opening, texts_of(spec.get("close")), is_text, bool(strips))


def texts_of(value: Any) -> tuple[str, ...]:
    """Return the texts of a delimiter: one, several, or none."""
    texts = [value] if isinstance(value, str) else value or []
    return tuple(text for text in texts if text != "eos")


def _are_distinct(marks: tuple[str, ...]) -> bool:
    """Return whether no delimiter is the beginning of another, or equal to it."""
    return not any(
        b.startswith(a) for i, a in enumerate(marks) for j, b in enumerate(marks) if i != j
    )


@dataclass(frozen=True)
class _Piece:
    """Part of an answer: text of a field, one of its delimiters, or a whole region."""

    field: _Field | None
    text: str
    is_mark: bool = False
    is_region: bool = False
    num_given: int = 0  # characters of a region that the prompt has

    @property
    def new_text(self) -> str:
        """The text without what the prompt has of it."""
        return self.text[self.num_given :]


class _Splitter:
    """Incrementally splits an answer into pieces."""

    def __init__(self, regions: Regions) -> None:
        self._regions = regions
        self._current = regions.implicit
        self._source: list[str] | None = None  # parts of a region that the worker will read
        self._num_given = 0  # characters of that region in the prompt
        self._pending = ""  # possible start of a delimiter
        self._pieces: list[_Piece] = []
        self._markers: dict[_Field | None, Markers | None] = {}

    def feed(self, text: str, *, is_last: bool) -> list[_Piece]:
        """Feed text; return the pieces that are now final."""
        text = self._pending + text
        at = 0
        while True:
            markers = self._watched()
            found, mark = (len(text), None) if markers is None else markers.find(text, at, is_last)
            self._take(text[at:found])
            if mark is None:
                break
            self._switch(mark)
            at = found + len(mark)
        self._pending = text[found:]
        if is_last and self._source is not None:
            self._end_region()
        pieces = self._pieces
        self._pieces = []
        return pieces

    def end_of_prompt(self) -> None:
        """Take what the prompt has of a delimiter as text; none goes on in the answer."""
        self._take(self._pending)
        self._pending = ""
        self._num_given = len(self.open_region)

    @property
    def open_region(self) -> str:
        """The text so far of a region that the worker will read; "" if none is open."""
        return "".join(self._source or ())

    def _watched(self) -> Markers | None:
        if self._current not in self._markers:
            marks = self._regions.watched(self._current)
            self._markers[self._current] = Markers(*marks) if marks else None
        return self._markers[self._current]

    def _take(self, text: str) -> None:
        if self._source is not None:
            self._source.append(text)
        elif text:
            self._pieces.append(_Piece(self._current, text))

    def _switch(self, mark: str) -> None:
        """End a region, or begin one."""
        if self._current is not self._regions.implicit:
            if self._source is None:
                self._pieces.append(_Piece(self._current, mark, is_mark=True))
            else:
                self._source.append(mark)
                self._end_region()
            self._current = self._regions.implicit
            return
        opened = next((one for one in self._regions.fields if mark in one.opening), None)
        if opened is None or opened.is_text:
            self._pieces.append(_Piece(opened or self._current, mark, is_mark=True))
        else:
            self._source = [mark]
        self._current = opened or self._current

    def _end_region(self) -> None:
        assert self._source is not None
        text = "".join(self._source)
        self._pieces.append(_Piece(self._current, text, is_region=True, num_given=self._num_given))
        self._source = None
        self._num_given = 0


def _gate() -> TextGate:
    """Return a gate that drops white space at both ends of a text."""
    gate = TextGate()
    gate.cut()
    return gate


class _Fields:
    """Tells the pieces of an answer apart: reasoning, content, or a region to be read."""

    def __init__(self, parse: Callable[[str], Parsed], *, strips_content: bool) -> None:
        self._parse = parse
        self._gates = {"reasoning": _gate(), _CONTENT: _gate()}
        self._strips_content = strips_content
        self._num_read = 0

    def reasoning(self, piece: _Piece) -> str | None:
        """Return the reasoning of a piece; None if it is no piece of reasoning."""
        if piece.field is None or piece.field.name not in THOUGHTS:
            return None
        return "" if piece.is_mark else self._pass("reasoning", piece.text, piece.field.strips)

    def content(self, piece: _Piece) -> tuple[str, tuple[tuple[str, str], ...]]:
        """Return the content and the calls of a piece."""
        if piece.is_region:
            self._num_read += 1
            if self._num_read <= MAX_CALLS:
                parsed = self._parse(piece.text)
                if parsed.calls or not parsed.content:
                    return "", parsed.calls
            return self._pass(_CONTENT, piece.new_text, self._strips_content), ()
        if piece.is_mark or piece.field is None or piece.field.name != _CONTENT:
            return "", ()
        return self._pass(_CONTENT, piece.text, self._strips_content), ()

    def _pass(self, kind: str, text: str, strips: bool) -> str:
        return self._gates[kind].push(text) if strips else text


class StreamedReasoning:
    """Splits an answer into reasoning and content; has `ReasoningReader`'s methods.

    Parameters
    ----------
    regions : Regions
    prompt : str
        The prompt, or its end.
    parse : callable
        Reads a region.
    keeps_calls : bool
        Whether a `StreamedTools` reads the content: it gets all that is not reasoning.
    """

    ends_header: str = ""

    def __init__(
        self,
        regions: Regions,
        prompt: str,
        parse: Callable[[str], Parsed],
        *,
        keeps_calls: bool,
    ) -> None:
        self._splitter = _Splitter(regions)
        self._fields = _Fields(parse, strips_content=regions.strips_content)
        self._keeps_calls = keeps_calls
        begun = self.feed(regions.begun(prompt))[1]
        self._splitter.end_of_prompt()
        self.begun = begun + self.feed("")[1] + self._splitter.open_region
        """Content of the message that the prompt has begun."""

    @property
    def is_reasoning(self) -> bool:
        """Whether the next text may be reasoning."""
        return True

    def feed(self, delta: str) -> tuple[str, str]:
        """Feed text; return the reasoning and content that are now final."""
        return self._read(self._splitter.feed(delta, is_last=False))

    def finish(self) -> tuple[str, str]:
        """Signal the end of the text; return the reasoning and content held back so far."""
        return self._read(self._splitter.feed("", is_last=True))

    def _read(self, pieces: list[_Piece]) -> tuple[str, str]:
        thoughts: list[str] = []
        content: list[str] = []
        for piece in pieces:
            thought = self._fields.reasoning(piece)
            if thought is not None:
                thoughts.append(thought)
            elif self._keeps_calls:
                content.append(piece.new_text)
            else:
                content.append(self._fields.content(piece)[0])
        return "".join(thoughts), "".join(content)


class StreamedTools:
    """Returns an answer's content and calls; has `ToolParser`'s methods.

    Parameters
    ----------
    regions : Regions
    begun : str
        Text of the message that the prompt has begun.
    parse : callable
        Reads a region.
    make_id : callable, optional
        Returns an id for a new call.
    """

    markers: tuple[str, ...] = ()

    def __init__(
        self,
        regions: Regions,
        begun: str,
        parse: Callable[[str], Parsed],
        make_id: Callable[[], str] = random_id,
    ) -> None:
        self._splitter = _Splitter(regions)
        self._fields = _Fields(parse, strips_content=regions.strips_content)
        self._make_id = make_id
        self._num_calls = 0
        self.feed(begun)
        self._splitter.end_of_prompt()
        self.feed("")
        self._num_calls = 0  # The answer's calls are numbered from 0, whatever the prompt has.

    def feed(self, delta: str) -> list[Event]:
        """Feed text; return the events that later text can no longer change."""
        return self._read(self._splitter.feed(delta, is_last=False))

    def finish(self) -> list[Event]:
        """Signal the end of the text; return the events held back so far."""
        return self._read(self._splitter.feed("", is_last=True))

    def _read(self, pieces: list[_Piece]) -> list[Event]:
        events: list[Event] = []
        for piece in pieces:
            content, calls = self._fields.content(piece)
            if content:
                events.append(TextDelta(content))
            for name, arguments in calls:
                events += call_events(self._num_calls, self._make_id(), name, arguments)
                self._num_calls += 1
        return events
