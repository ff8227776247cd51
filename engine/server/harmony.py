"""`HarmonyReasoning`: splits gpt-oss's messages into reasoning, content, and calls.

An answer is a sequence of messages, ``header<|message|>text<|end|>``, of which the prompt has begun
the first with ``<|start|>assistant``. A header names a channel ("analysis", "commentary", "final")
and, for a call, the recipient ``to=functions.NAME``.
"""

from __future__ import annotations

import re

from engine.server.markers import Markers

__all__ = ["CHANNEL", "MARKERS", "NEXT_MESSAGE", "HarmonyReasoning", "recipient_of"]

_START = "<|start|>"
CHANNEL = "<|channel|>"
_CONSTRAIN = "<|constrain|>"
_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>")

MARKERS = (_START, CHANNEL, _CONSTRAIN, _MESSAGE, *_ENDS)
"""Markers of the format; where they are special tokens, the text must keep those."""

NEXT_MESSAGE = f"{_START}{_MESSAGE}"
"""Text behind a call in the content, where another message has begun: an empty header."""

_MAX_HEADER_CHARS = 400
_IN_HEADER = Markers(_START, _MESSAGE, *_ENDS)
_IN_BODY = Markers(_START, CHANNEL, *_ENDS)
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*([A-Za-z_]*)")
_FUNCTIONS = "functions."
_ROLE = "assistant"
_AFTER_ROLE = ("to=", CHANNEL, _CONSTRAIN)


def recipient_of(header: str) -> str | None:
    """Return the function that a message calls, or None.

    Examples
    --------
    >>> recipient_of("assistant<|channel|>commentary to=functions.add <|constrain|>json")
    'add'
    """
    match = _RECIPIENT.search(header)
    if match is None or not match[1].startswith(_FUNCTIONS):
        return None
    return match[1].removeprefix(_FUNCTIONS)


class HarmonyReasoning:
    """Incrementally splits one answer into reasoning and content; has `ReasoningParser`'s methods.

    Messages of the channel "analysis" are reasoning, the others content. Messages to functions stay
    whole for the parser of tool calls, with `NEXT_MESSAGE` between one and the next message of any
    kind, or without one lose their markup. An answer without markup is content. Several messages of
    a kind are separated by an empty line.

    Parameters
    ----------
    prompt : str
        The prompt that the model continues: its last message may have begun.
    keeps_calls : bool
        Whether a parser of tool calls reads the content.

    Examples
    --------
    >>> parser = HarmonyReasoning("<|start|>assistant")
    >>> parser.feed("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant")
    ('Hm.', '')
    >>> parser.feed("<|channel|>final<|message|>Yes<|ret")
    ('', 'Yes')
    """

    ends_header: str = _MESSAGE

    def __init__(self, prompt: str = "", *, keeps_calls: bool = False) -> None:
        self._keeps_calls = keeps_calls
        self._pending = ""  # possible start of a marker
        self._header = ""
        self._num_given = 0  # characters of the header that the prompt has
        self._kind = ""  # of the message: "reasoning", "content" or "call"; in its header ""
        self._is_plain = False  # the answer has no markup
        self._follows_call = False  # whether the last header was that of a kept call
        self._has = {"reasoning": False, "content": False}  # whether there is text of a kind
        self._is_new = False  # whether the message has had no text so far
        self._out: dict[str, list[str]] = {"reasoning": [], "content": []}
        begun = prompt[prompt.rfind(_START) :] if _START in prompt else ""
        if begun and not any(end in begun for end in _ENDS):
            self._split(begun.removeprefix(_START), is_last=False)
            self._take()
            self._num_given = len(self._header)
            self._is_new = False  # the answer goes on where the prompt ends

    @property
    def is_reasoning(self) -> bool:
        """Whether the next text may be reasoning."""
        return self._is_header or self._kind == "reasoning"

    def feed(self, delta: str) -> tuple[str, str]:
        """Feed text; return the reasoning and content that are now final."""
        if self._kind and not (self._is_new or self._pending or "<" in delta):  # no marker begins
            kind = "reasoning" if self._kind == "reasoning" else "content"
            if delta and not self._is_kept_call:
                self._has[kind] = True  # it may go on where the prompt ends
            return (delta, "") if kind == "reasoning" else ("", delta)
        self._split(self._pending + delta, is_last=False)
        return self._take()

    def finish(self) -> tuple[str, str]:
        """Signal the end of the text; return the reasoning and content held back so far."""
        self._split(self._pending, is_last=True)
        return self._take()

    def _take(self) -> tuple[str, str]:
        out = self._out
        self._out = {"reasoning": [], "content": []}
        return "".join(out["reasoning"]), "".join(out["content"])

    @property
    def _is_header(self) -> bool:
        return not self._kind and not self._is_plain

    @property
    def _is_kept_call(self) -> bool:
        return self._kind == "call" and self._keeps_calls

    def _split(self, text: str, *, is_last: bool) -> None:
        at = 0
        while True:
            was_header = self._is_header
            found, marker = (_IN_HEADER if was_header else _IN_BODY).find(text, at, is_last)
            at += self._read(text[at:found])
            if was_header and not self._is_header:
                continue  # other markers count in text without a header
            if marker is None:
                break
            self._mark(marker)
            at = found + len(marker)
        self._pending = text[at:]

    def _read(self, text: str) -> int:
        """Read text of a header or a message; return the number of characters read."""
        if self._is_kept_call:
            self._out["content"].append(text)
        elif self._is_header:
            return self._read_header(text)
        else:
            self._put("reasoning" if self._kind == "reasoning" else "content", text)
        return len(text)

    def _read_header(self, text: str) -> int:
        """Read text of a header, up to the character that shows that it is none."""
        header = self._header + text
        most = min(len(header), _MAX_HEADER_CHARS)
        if len(header) == most and _may_be_header(header):
            self._header = header
            return len(text)
        ends = range(len(self._header) + 1, most + 1)
        end = next((end for end in ends if not _may_be_header(header[:end])), most + 1)
        self._is_plain = True
        self._put("content", header[self._num_given : end])
        return end - len(self._header)

    def _mark(self, marker: str) -> None:
        if marker == _MESSAGE:
            self._begin()
        elif marker in (_START, CHANNEL):  # the closing marker is missing, or has been read
            self._end("")
            self._header = marker.removeprefix(_START)
        else:
            self._end(marker)

    def _begin(self) -> None:
        """Begin a message's text."""
        channel = _CHANNEL_NAME.search(self._header)
        if recipient_of(self._header) is not None:
            self._kind = "call"
        else:
            is_thought = channel is not None and channel[1] == "analysis"
            self._kind = "reasoning" if is_thought else "content"
        if self._follows_call:
            self._out["content"].append(NEXT_MESSAGE)
        if self._is_kept_call:
            self._out["content"].append(f"{_START}{self._header}{_MESSAGE}")
        self._follows_call = self._is_kept_call
        self._header = ""
        self._num_given = 0
        self._is_new = not self._is_kept_call  # a whole call is never parted

    def _end(self, marker: str) -> None:
        """End a message, whose closing marker may be missing."""
        if self._is_kept_call:
            self._out["content"].append(marker or _ENDS[0])
        self._kind = self._header = ""
        self._num_given = 0
        self._is_plain = False

    def _put(self, kind: str, text: str) -> None:
        if not text:
            return
        if self._is_new and self._has[kind]:
            self._out[kind].append("\n\n")
        self._is_new = False
        self._has[kind] = True
        self._out[kind].append(text)


def _may_be_header(text: str) -> bool:
    """Tell whether the text is the beginning of a header, or may become one."""
    rest = text.lstrip()
    if _ROLE.startswith(rest):
        return True
    rest = rest.removeprefix(_ROLE).lstrip()
    return not rest or any(rest.startswith(s) or s.startswith(rest) for s in _AFTER_ROLE)
