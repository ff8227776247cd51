"""Reasoning parsers: split `<think>...</think>`, or gpt-oss's messages, off an answer.

Some templates end the prompt with `<think>`, others with an empty block that tells the model not to
think. So the end of the prompt determines whether an answer begins inside the block.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from typing import Protocol

from engine.errors import ConfigError
from engine.server import harmony
from engine.server.markers import Markers, TextGate
from engine.server.tool_parsers import (
    Event,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    ToolParser,
)

__all__ = [
    "NAMES",
    "ReasoningParser",
    "ReasoningReader",
    "detect",
    "get",
    "last_text",
    "markers_of",
]

_OPEN = "<think>"
_CLOSE = "</think>"
_MARKERS = Markers(_CLOSE)


def _beginnings(marker: str) -> str:
    return "|".join(re.escape(marker[:count]) for count in range(1, len(marker)))


# Markers that an answer repeats, and the beginnings of one: after the opening marker, and after the
# closing one, where a whole empty block may be repeated too.
_EMPTY = rf"(?:{_OPEN}\s{{0,8}})?"
_Patterns = tuple[re.Pattern[str], re.Pattern[str]]
_OPENED = re.compile(rf"\s*(?:{_OPEN}\s*)*"), re.compile(_beginnings(_OPEN))
_CLOSED = (
    re.compile(rf"\s*(?:{_EMPTY}{_CLOSE}\s*)*"),
    re.compile(rf"{_beginnings(_OPEN)}|{_EMPTY}(?:{_beginnings(_CLOSE)})?"),
)
_DEEPSEEK = "<\uff5cAssistant\uff5c>"

_HARMONY = "harmony"

NAMES = ("deepseek_r1", _HARMONY, "qwen3")
"""Names of all reasoning parsers."""


class ReasoningReader(Protocol):
    """Incrementally splits one answer into reasoning and content."""

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
    the block begins or ends. An unclosed block is reasoning to the end, or up to its first tool
    call.

    Parameters
    ----------
    is_open : bool or None
        Whether the answer begins inside the block; None: the answer may open one itself.
    tools : callable, optional
        Returns a parser of the tool calls that end an unclosed block. None: nothing is a call.
    is_continued : bool
        Whether the block or the content has text already, so white space at the beginning is kept.

    Examples
    --------
    >>> parser = ReasoningParser(None)
    >>> parser.feed("<think>\\nHm"), parser.feed("m.\\n</thi"), parser.feed("nk>\\n\\nYes")
    (('Hm', ''), ('m.', ''), ('', 'Yes'))
    """

    def __init__(
        self,
        is_open: bool | None,
        tools: Callable[[], ToolParser] | None = None,
        *,
        is_continued: bool = False,
    ) -> None:
        self._gate = TextGate()  # trims the reasoning
        self._block = _OpenBlock(tools)
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
            text = self._after_marker(_OPENED, text, is_last, "reasoning")
        if self._state == "reasoning":
            thought, rest = self._block.feed(text, is_last)
            reasoning = self._gate.push(thought)
            text = rest or ""
            if rest is not None:
                self._state = "closed"
        if self._state == "closed":
            text = self._after_marker(_CLOSED, text, is_last, "content")
        return reasoning, text if self._state == "content" else ""

    def _after_start(self, text: str, is_last: bool) -> str:
        """Detect whether the answer opens a block; return the rest of the text."""
        rest = text.lstrip()
        self._held.append(text[: len(text) - len(rest)])
        if not rest or (not is_last and any(mark.startswith(rest) for mark in (_OPEN, _CLOSE))):
            self._pending = rest
            return ""
        if rest.startswith(_OPEN):
            self._state = "opened"
        elif rest.startswith(_CLOSE):
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
        if not rest or (not is_last and begun.fullmatch(rest)):
            self._pending = rest
            return ""
        self._state = following
        return rest


class _OpenBlock:
    """Finds the end of an open block: a closing marker, or else its first tool call.

    A call is held back until the text ends, or until a closing marker after it shows that it is
    part of the reasoning. A closing marker in a call's arguments is part of them.

    Parameters
    ----------
    tools : callable or None
        Returns a parser of the tool calls.
    """

    def __init__(self, tools: Callable[[], ToolParser] | None) -> None:
        self._tools = tools() if tools is not None else None
        self._pending = ""  # possible start of the marker
        self._held: list[str] = []  # text after the first `_num_passed` characters
        self._num_passed = 0
        self._num_read = 0
        self._num_text = 0  # characters before the first call
        self._num_start = 0  # characters of the first call before its arguments
        self._num_arguments = 0  # characters of its arguments so far
        self._has_begun = False  # whether the first call has begun
        self._has_call = False  # whether it is complete
        self._close: int | None = None  # position of a marker, unless it is in a call's arguments
        self._is_closed = False

    def feed(self, text: str, is_last: bool) -> tuple[str, str | None]:
        """Return the reasoning that is now final, and the text after the block if it has ended."""
        text = self._pending + text
        at = 0
        marker: str | None = _CLOSE
        while marker is not None and not self._is_closed:
            found, marker = _MARKERS.find(text, at, is_last)
            self._read(text[at:found])
            at = found
            if marker is not None and not self._is_closed:
                self._close = self._num_read if self._close is None else self._close
                self._read(marker)
                at += len(marker)
        self._pending = text[at:]
        if is_last and not self._is_closed:
            self._note([] if self._tools is None else self._tools.finish())
            self._is_closed = self._close is not None
        if self._is_closed:
            assert self._close is not None
            thought = self._pass(self._close)
            return thought, "".join((*self._held, self._pending))[len(_CLOSE) :]
        if is_last and self._has_begun:
            return self._pass(self._num_text), "".join(self._held)
        return self._pass(self._num_read if is_last else self._num_text), None

    def _pass(self, end: int) -> str:
        """Return the held text up to position `end`."""
        num_chars = end - self._num_passed
        if num_chars <= 0:
            return ""
        held = "".join(self._held)
        self._held = [held[num_chars:]]
        self._num_passed = end
        return held[:num_chars]

    def _read(self, text: str) -> None:
        """Read text without a marker, or a marker."""
        if not text:
            return
        self._held.append(text)
        self._num_read += len(text)
        events = [TextDelta(text)] if self._tools is None else self._tools.feed(text)
        self._note(events)
        if self._close is not None:
            ends = (e for e in events if isinstance(e, (TextDelta, ToolCallEnd)))
            end = next(ends, None)
            if isinstance(end, ToolCallEnd) and end.is_complete:
                self._close = None  # the marker was in its arguments
            else:
                self._is_closed = end is not None

    def _note(self, events: Iterable[Event]) -> None:
        """Find the position of the first call."""
        for event in events:
            if self._has_call:
                return
            if isinstance(event, TextDelta):
                self._num_text += len(event.text)
            elif isinstance(event, ToolCallStart):
                self._has_begun = True
                self._num_start = len(event.source)
                self._num_arguments = 0
            elif isinstance(event, ToolCallDelta):
                self._num_arguments += len(event.arguments)
            elif event.is_damaged:
                self._has_begun = False
                self._num_text += self._num_start + (len(event.source) or self._num_arguments)
            else:
                self._has_call = True


def get(
    name: str,
    prompt: str | None = None,
    tools: Callable[[], ToolParser] | None = None,
    continued: str = "",
) -> ReasoningReader:
    """Return a new parser for one answer.

    Parameters
    ----------
    name : str
        One of `NAMES`.
    prompt : str, optional
        The prompt that the model continues; its end determines whether the block is open. Without
        it, "deepseek_r1" begins inside the block and "qwen3" may open one.
    tools : callable, optional
        Returns a parser of the tool calls that end an unclosed block. None: nothing is a call.
    continued : str
        Text of the message that the answer continues, if any: the answer is reasoning if the text
        has an open block.

    Raises
    ------
    ConfigError
        If there is no parser of this name; the message suggests the closest one.

    Examples
    --------
    >>> get("qwen3", prompt="<|im_start|>assistant\\n<think>\\n").feed("Hm.</think>Yes")
    ('Hm.', 'Yes')
    """
    if name not in NAMES:
        near = difflib.get_close_matches(name[:80], NAMES, n=1)
        hint = f". Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"reasoning parser must be one of {', '.join(NAMES)}; got {name[:80]!r}{hint}"
        )
    if name == _HARMONY:
        return harmony.HarmonyReasoning(prompt or "", keeps_calls=tools is not None)
    if continued.strip():
        is_open, text = last_text(continued)
        is_begun = bool(text.strip()) and not text.rstrip().endswith(_CLOSE)
        return ReasoningParser(is_open, tools, is_continued=is_begun)
    if prompt is None:
        return ReasoningParser(True if name == "deepseek_r1" else None, tools)
    end = prompt[-64:].rstrip()
    if end.endswith(_OPEN):
        return ReasoningParser(True, tools)
    return ReasoningParser(False if end.endswith(_CLOSE) else None, tools)


def markers_of(name: str) -> tuple[str, ...]:
    """Return a format's markers; where they are special tokens, the text must keep those."""
    return harmony.MARKERS if name == _HARMONY else (_OPEN, _CLOSE)


def last_text(message: str) -> tuple[bool, str]:
    """Return whether a message ends inside its block, and its text there: reasoning or content.

    Examples
    --------
    >>> last_text("<think>Hm."), last_text("<think>Hm.</think>Yes"), last_text("A <think> tag")
    ((True, 'Hm.'), (False, 'Yes'), (False, 'A <think> tag'))
    """
    parser = ReasoningParser(None)
    thought, content = parser.feed(message)
    more_thought, more_content = parser.finish()
    if parser.is_reasoning:
        return True, thought + more_thought
    return False, content + more_content


def detect(chat_template: str) -> str | None:
    """Return the name of the parser that fits this chat template, or None.

    Examples
    --------
    >>> detect("{% if enable_thinking is false %}<think></think>{% endif %}"), detect("{{ x }}")
    ('qwen3', None)
    """
    if harmony.CHANNEL in chat_template:
        return _HARMONY
    if _CLOSE not in chat_template:
        return None
    return "deepseek_r1" if _DEEPSEEK in chat_template else "qwen3"
