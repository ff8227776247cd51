"""Reasoning parsers: split `<think>...</think>` off the start of an answer.

Some templates end the prompt with `<think>`, others with an empty block that tells the model not to
think. So the end of the prompt determines whether an answer begins inside the block.
"""

from __future__ import annotations

import difflib

from engine.errors import ConfigError
from engine.server.markers import Markers, TextGate

__all__ = ["NAMES", "ReasoningParser", "detect", "get"]

_OPEN = "<think>"
_CLOSE = "</think>"
_MARKERS = Markers(_CLOSE)
_DEEPSEEK = "<\uff5cAssistant\uff5c>"

NAMES = ("deepseek_r1", "qwen3")
"""Names of all reasoning parsers."""


class ReasoningParser:
    """Incrementally splits one answer into reasoning and content.

    The concatenated results do not depend on how the text is split into chunks. White space around
    the reasoning and after the block is dropped. An unclosed block is reasoning to the end.

    Parameters
    ----------
    is_open : bool or None
        Whether the answer begins inside the block; None: the answer may open one itself.
    is_continued : bool
        Whether the block has text already, so white space at the beginning is kept.

    Examples
    --------
    >>> parser = ReasoningParser(None)
    >>> parser.feed("<think>\\nHm"), parser.feed("m.\\n</thi"), parser.feed("nk>\\n\\nYes")
    (('Hm', ''), ('m.', ''), ('', 'Yes'))
    """

    def __init__(self, is_open: bool | None, *, is_continued: bool = False) -> None:
        self._gate = TextGate()  # trims the reasoning
        if not is_continued:
            self._gate.cut()
        self._held: list[str] = []  # white space before the block or the content
        self._pending = ""  # possible start of a marker
        self._state = "content" if is_open is False else "reasoning" if is_open else "start"

    @property
    def is_reasoning(self) -> bool:
        """Whether the next text may be reasoning."""
        return self._state in ("start", "reasoning")

    def feed(self, delta: str) -> tuple[str, str]:
        """Feed text; return the reasoning and content that are now final."""
        return self._split(self._pending + delta, is_last=False)

    def finish(self) -> tuple[str, str]:
        """Signal the end of the text; return the reasoning and content held back so far."""
        reasoning, content = self._split(self._pending, is_last=True)
        if self._state == "start":  # white space only
            content = "".join(self._held) + content
        return reasoning, content

    def _split(self, text: str, is_last: bool) -> tuple[str, str]:
        self._pending = ""
        if self._state == "start":
            text = self._after_start(text, is_last)
        reasoning = ""
        if self._state == "reasoning":
            reasoning, text = self._in_reasoning(text, is_last)
        if self._state == "closed":
            text = text.lstrip()
            if text:
                self._state = "content"
        return reasoning, text if self._state == "content" else ""

    def _after_start(self, text: str, is_last: bool) -> str:
        """Detect whether the answer opens a block; return the rest of the text."""
        rest = text.lstrip()
        self._held.append(text[: len(text) - len(rest)])
        if rest.startswith(_OPEN):
            self._state = "reasoning"
            return rest[len(_OPEN) :]
        if _OPEN.startswith(rest) and not (rest and is_last):
            self._pending = rest
            return ""
        self._state = "content"
        return "".join(self._held) + rest

    def _in_reasoning(self, text: str, is_last: bool) -> tuple[str, str]:
        """Return the reasoning, and the text after the block."""
        found, marker = _MARKERS.find(text, 0, is_last)
        reasoning = self._gate.push(text[:found])
        if marker is None:
            self._pending = text[found:]
            return reasoning, ""
        self._state = "closed"
        return reasoning, text[found + len(_CLOSE) :]


def get(name: str, prompt: str | None = None, continued: str = "") -> ReasoningParser:
    """Return a new parser for one answer.

    Parameters
    ----------
    name : str
        One of `NAMES`.
    prompt : str, optional
        The prompt that the model continues; its end determines whether the block is open. Without
        it, "deepseek_r1" begins inside the block and "qwen3" may open one.
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
    if continued.strip():
        _, mark, thought = continued.rpartition(_OPEN)
        is_open = bool(mark) and _CLOSE not in thought
        return ReasoningParser(is_open, is_continued=bool(thought.strip()))
    if prompt is None:
        return ReasoningParser(True if name == "deepseek_r1" else None)
    end = prompt[-64:].rstrip()
    return ReasoningParser(True if end.endswith(_OPEN) else False if end.endswith(_CLOSE) else None)


def detect(chat_template: str) -> str | None:
    """Return the name of the parser that fits this chat template, or None.

    Examples
    --------
    >>> detect("{% if enable_thinking is false %}<think></think>{% endif %}"), detect("{{ x }}")
    ('qwen3', None)
    """
    if _CLOSE not in chat_template:
        return None
    return "deepseek_r1" if _DEEPSEEK in chat_template else "qwen3"
