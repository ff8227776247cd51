"""`ReasoningParser`: splits a block of thoughts off an answer."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Protocol

from engine.server.markers import Markers, TextGate
from engine.server.reasoning._open_block import OpenBlock
from engine.server.reasoning.formats import Block
from engine.server.tool_parsers import ToolParser

__all__ = ["ReasoningParser", "ReasoningReader"]

_Patterns = tuple[re.Pattern[str], re.Pattern[str]]


class ReasoningReader(Protocol):
    """Incrementally splits one answer into reasoning and content."""

    ends_header: str
    """Marker between a message's header and its text, which may be reasoning behind content; "" if
    an answer is one message."""

    @property
    def is_reasoning(self) -> bool:
        """Whether the next text may be reasoning."""

    def feed(self, delta: str) -> tuple[str, str]:
        """Feed text; return the reasoning and content that are now final."""

    def finish(self) -> tuple[str, str]:
        """Signal the end of the text; return the reasoning and content held back so far."""


class ReasoningParser:
    """Incrementally splits one answer into reasoning and content.

    The concatenated results do not depend on how the text is split into chunks. White space around
    the reasoning and after the block is dropped, and so are markers that the answer repeats where
    the block begins or ends, and those around the content. An unclosed block is reasoning to the
    end, or up to its first tool call.

    Parameters
    ----------
    block : Block
        The format.
    is_open : bool or None
        Whether the answer begins inside the block; None: the answer may open one itself.
    tools : callable, optional
        Returns a parser of the tool calls that end an unclosed block. None: nothing is a call.
    is_continued : bool
        Whether the block or the content has text already, so white space at the beginning is kept.
    answer_end : str, optional
        The closing marker of the content, if the prompt has the opening one.

    Examples
    --------
    >>> from engine.server.reasoning.formats import FORMATS
    >>> parser = ReasoningParser(FORMATS["qwen3"], None)
    >>> parser.feed("<think>\\nHm"), parser.feed("m.\\n</thi"), parser.feed("nk>\\n\\nYes")
    (('Hm', ''), ('m.', ''), ('', 'Yes'))
    """

    ends_header: str = ""

    def __init__(
        self,
        block: Block,
        is_open: bool | None,
        tools: Callable[[], ToolParser] | None = None,
        *,
        is_continued: bool = False,
        answer_end: str | None = None,
    ) -> None:
        self._format = block
        self._gate = TextGate()  # trims the reasoning
        self._block = OpenBlock(block.closing, tools)
        self._answer = None if answer_end is None else AnswerGate(answer_end)
        if not is_continued:
            self._gate.cut()
        self._held: list[str] = []  # white space before the block or the content
        self._pending = ""  # possible start of a marker
        self._state = "start"
        if is_open is not None:
            begun = "reasoning" if is_open else "content"
            self._state = begun if is_continued else "opened" if is_open else "closed"

    @property
    def is_reasoning(self) -> bool:
        """Whether the next text may be reasoning."""
        return self._state in ("start", "opened", "reasoning")

    def feed(self, delta: str) -> tuple[str, str]:
        """Feed text; return the reasoning and content that are now final."""
        return self._split(delta, is_last=False)

    def finish(self) -> tuple[str, str]:
        """Signal the end of the text; return the reasoning and content held back so far."""
        reasoning, content = self._split("", is_last=True)
        if self._state == "start":  # white space only
            content = "".join(self._held) + content
        return reasoning, content

    def _split(self, text: str, is_last: bool) -> tuple[str, str]:
        text = self._pending + text
        self._pending = ""
        reasoning = ""
        if self._state == "start":
            text = self._after_start(text, is_last)
        if self._state == "opened":
            text = self._after_marker(self._format.opened, text, is_last, "reasoning")
        if self._state == "reasoning":
            thought, rest = self._block.feed(text, is_last)
            reasoning = self._gate.push(thought)
            text = rest or ""
            if rest is not None:
                self._state = "closed"
        if self._state == "closed":
            text = self._after_marker(self._format.closed, text, is_last, "content")
        if self._state != "content":
            return reasoning, ""
        return reasoning, text if self._answer is None else self._answer.push(text, is_last)

    def _after_start(self, text: str, is_last: bool) -> str:
        """Detect whether the answer opens a block; return the rest of the text."""
        rest = text.lstrip()
        self._held.append(text[: len(text) - len(rest)])
        begins = tuple(begin for begin, _ in self._format.answers)
        ends = (*self._format.closing, *begins)
        markers = (*self._format.opening, *ends)
        if not rest or (not is_last and any(mark.startswith(rest) for mark in markers)):
            self._pending = rest
            return ""
        if rest.startswith(self._format.opening):
            self._state = "opened"
        elif rest.startswith(ends):
            self._state = "closed"
        else:
            self._state = "content"
            return "".join(self._held) + rest
        return rest

    def _after_marker(self, patterns: _Patterns, text: str, is_last: bool, following: str) -> str:
        """Skip white space and repeated markers; return the rest of the text."""
        repeated, begun = patterns
        match = repeated.match(text)
        assert match is not None  # the pattern also matches an empty string
        rest = text[match.end() :]
        opening = match[1] if following == "content" else None
        if not rest or (not is_last and not opening and begun.fullmatch(rest)):
            self._pending = match[1] if opening else rest
            return ""
        if following == "content" and (opening or self._format.end):
            ends = dict(self._format.answers)
            self._answer = AnswerGate(ends[opening] if opening else self._format.end)
        self._state = following
        return rest


class AnswerGate:
    """Drops the closing marker of the content, at its end or before another marker.

    White space around the marker is dropped where the content ends. A marker before other text is
    text, since the content may be about it.

    Parameters
    ----------
    closing : str

    Examples
    --------
    >>> gate = AnswerGate("</answer>")
    >>> gate.push("Yes.\\n</ans", False), gate.push("wer>\\n", True)
    ('Yes.', '')
    """

    def __init__(self, closing: str) -> None:
        self._closing = closing
        self._markers = Markers(closing)
        self._pending = ""  # possible start of the marker
        self._held: list[str] = []  # white space and closing markers that may end the content
        self._has_marker = False

    def push(self, text: str, is_last: bool) -> str:
        """Feed text; return the content that is now final."""
        text = self._pending + text
        passed: list[str] = []
        at = 0
        while True:
            found, marker = self._markers.find(text, at, is_last)
            if at < found:
                passed.append(self._pass(text[at:found]))
            if marker is None:
                break
            self._held.append(marker)
            self._has_marker = True
            at = found + len(marker)
        self._pending = text[found:]
        if is_last and not self._has_marker:
            passed += self._held
        return "".join(passed)

    def _pass(self, text: str) -> str:
        """Return text that is followed by more, without white space at its end, which is held."""
        if not text.isspace() and self._has_marker:
            if text.lstrip().startswith("<"):  # another marker, such as that of a call
                self._held = [part for part in self._held if part != self._closing]
            self._has_marker = False
        kept = "" if self._has_marker else text.rstrip()
        if not kept:
            self._held.append(text)
            return ""
        passed = "".join((*self._held, kept))
        self._held = [text[len(kept) :]]
        return passed
