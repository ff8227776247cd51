"""Reasoning parsers: split the thoughts off an answer, one row of a table per format.

Some templates end the prompt with the opening marker, others with an empty block that tells the
model not to think. So the end of the prompt determines whether an answer begins inside the block.
gpt-oss's messages have a reader of their own.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.errors import ConfigError, did_you_mean
from engine.server import harmony
from engine.server.reasoning._parser import ReasoningParser, ReasoningReader
from engine.server.reasoning.formats import FORMATS, Block
from engine.server.tool_parsers import ToolParser

__all__ = [
    "NAMES",
    "Block",
    "ReasoningParser",
    "ReasoningReader",
    "detect",
    "get",
    "last_text",
    "markers_of",
]

_HARMONY = "harmony"
_END_CHARS = 200  # end of a prompt that is searched for a marker

NAMES = tuple(sorted((*FORMATS, _HARMONY)))
"""Names of all reasoning parsers."""


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
        it, "deepseek_r1" begins inside the block, and the others may open one.
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
        hint = did_you_mean(name, NAMES)
        raise ConfigError(
            f"reasoning parser must be one of {', '.join(NAMES)}; got {name[:80]!r}{hint}"
        )
    if name == _HARMONY:
        return harmony.HarmonyReasoning(prompt or "", keeps_calls=tools is not None)
    block = FORMATS[name]
    if continued.strip():
        is_thought, text = last_text(name, continued)
        is_begun = bool(text.strip()) and not text.rstrip().endswith(block.closing)
        return ReasoningParser(block, is_thought, tools, is_continued=is_begun)
    if prompt is None:
        return ReasoningParser(block, True if block.is_open else None, tools)
    end = prompt[-_END_CHARS:]
    is_open = block.is_open_at_end(end)
    return ReasoningParser(block, is_open, tools, answer_end=block.answer_at_end(end))


def markers_of(name: str) -> tuple[str, ...]:
    """Return a format's markers; where they are special tokens, the text must keep those."""
    return harmony.MARKERS if name == _HARMONY else FORMATS[name].markers


def last_text(name: str, message: str) -> tuple[bool, str]:
    """Return whether a message ends inside its block, and its text there: reasoning or content.

    Examples
    --------
    >>> last_text("qwen3", "<think>Hm."), last_text("qwen3", "<think>Hm.</think>Yes")
    ((True, 'Hm.'), (False, 'Yes'))
    >>> last_text("qwen3", "A <think> tag")
    (False, 'A <think> tag')
    """
    if name == _HARMONY:
        return False, message
    parser = ReasoningParser(FORMATS[name], None)
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
    fitting = (name for name, block in FORMATS.items() if block.is_used_by(chat_template))
    return next(fitting, None)
