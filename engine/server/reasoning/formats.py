"""The formats of reasoning: the markers of a block of thoughts, and the templates that have it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property

__all__ = ["FORMATS", "Block"]

_MAX_SPACE = 8  # characters of white space in an empty block that an answer repeats


@dataclass(frozen=True)
class Block:
    """Markers of one format: ``opening label thoughts closing answer[0] content answer[1]``.

    Attributes
    ----------
    opening, closing : tuple of str
        Markers around the thoughts; the first is the usual one.
    signs : tuple of tuple of str
        A chat template that contains all strings of one of them has this format, unless it has one
        of the formats before this in `FORMATS`.
    label : str
        Text that may follow the opening marker, and is not a thought.
    answers : tuple of (str, str)
        Markers that may stand around the content.
    end : str
        Marker that may end the content, although no marker begins it.
    in_prompt : str
        Text that a prompt may have behind the opening marker.
    is_open : bool
        Whether answers begin inside the block if the prompt is not known.
    """

    opening: tuple[str, ...]
    closing: tuple[str, ...]
    signs: tuple[tuple[str, ...], ...]
    label: str = ""
    answers: tuple[tuple[str, str], ...] = ()
    end: str = ""
    in_prompt: str = ""
    is_open: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """All markers."""
        around = (mark for pair in self.answers for mark in pair)
        return tuple(filter(None, (*self.opening, *self.closing, *around, self.end)))

    def is_used_by(self, chat_template: str) -> bool:
        """Tell whether the template contains the signs of this format."""
        return any(all(sign in chat_template for sign in signs) for signs in self.signs)

    def is_open_at_end(self, prompt: str) -> bool | None:
        """Return whether a prompt ends inside a block; None if the answer may open one."""
        if self._opened_end.search(prompt):
            return True
        return False if self._closed_end.search(prompt) else None

    def answer_at_end(self, prompt: str) -> str | None:
        """Return the closing marker of the content if a prompt ends with the opening one."""
        bare = prompt.rstrip()
        return next((end for begin, end in self.answers if bare.endswith(begin)), None)

    @cached_property
    def opened(self) -> tuple[re.Pattern[str], re.Pattern[str]]:
        """Patterns of the markers that may begin an open block, and of an incomplete marker."""
        marks = tuple(filter(None, (*self.opening, self.label)))
        return re.compile(rf"\s*(?:{_any(marks)}\s*)*"), re.compile(_beginnings(*marks))

    @cached_property
    def closed(self) -> tuple[re.Pattern[str], re.Pattern[str]]:
        """Patterns of the markers and empty blocks after a block, and of an incomplete one.

        Group 1 of the first pattern is the opening marker of the content.
        """
        space = rf"\s{{0,{_MAX_SPACE}}}"
        label = f"(?:{re.escape(self.label)}{space})?" if self.label else ""
        empty = rf"(?:{_any(self.opening)}{space}{label})?"
        begins = [begin for begin, _ in self.answers]
        answer = rf"(?:({_any(begins)})\s*)?" if begins else "()"
        begun_label = f"(?:{_beginnings(self.label)})" if self.label else ""
        begun = [
            _beginnings(*self.opening, *begins),
            rf"{empty}(?:{_beginnings(*self.closing)})?",
            rf"{_any(self.opening)}{space}{begun_label}",
        ]
        return (
            re.compile(rf"\s*(?:{empty}{_any(self.closing)}\s*)*{answer}"),
            re.compile("|".join(begun)),
        )

    @cached_property
    def _opened_end(self) -> re.Pattern[str]:
        after = [part for part in (self.label.rstrip(), self.in_prompt) if part]
        follows = rf"(?:\s{{0,{_MAX_SPACE}}}{_any(after)})?" if after else ""
        return re.compile(rf"{_any(self.opening)}{follows}\s*\Z")

    @cached_property
    def _closed_end(self) -> re.Pattern[str]:
        ends = [*self.closing, *(begin for begin, _ in self.answers)]
        return re.compile(rf"{_any(ends)}\s*\Z")


def _any(markers: list[str] | tuple[str, ...]) -> str:
    return f"(?:{'|'.join(map(re.escape, markers))})"


def _beginnings(*markers: str) -> str:
    """Return a pattern of the beginnings of markers, which are shorter than the markers."""
    return "|".join(
        re.escape(marker[:count]) for marker in markers for count in range(1, len(marker))
    )


def _tags(name: str) -> Block:
    return Block((f"<{name}>",), (f"</{name}>",), ((f"<{name}>",), (f"</{name}>",)))


_THINK = _tags("think")

FORMATS: dict[str, Block] = {
    "gemma4": Block(("<|channel>",), ("<channel|>",), (("<|channel>",),), label="thought\n"),
    "mistral": Block(("[THINK]",), ("[/THINK]",), (("[THINK]",),)),
    "cohere": Block(
        ("<|START_THINKING|>",),
        ("<|END_THINKING|>",),
        (("<|START_THINKING|>",),),
        answers=(
            ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
            ("<|START_TEXT|>", "<|END_TEXT|>"),
        ),
    ),
    "seed_oss": replace(_tags("seed:think"), in_prompt="<seed:cot_budget_reflect>"),
    "longcat": _tags("longcat_think"),
    "apertus": Block(("<|inner_prefix|>",), ("<|inner_suffix|>",), (("<|inner_prefix|>",),)),
    "kimi_vl": Block(("\u25c1think\u25b7",), ("\u25c1/think\u25b7",), (("\u25c1think\u25b7",),)),
    "granite": Block(
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"),
        (("Here is my thought process:",),),
    ),
    "apriel": Block(
        ("Here are my reasoning steps:",),
        ("[BEGIN FINAL RESPONSE]",),
        (("[BEGIN FINAL RESPONSE]",),),
        end="[END FINAL RESPONSE]",
    ),
    "ernie45": replace(
        _THINK,
        signs=(("<response>", "<think>"), ("<response>", "</think>")),
        answers=(("<response>", "</response>"),),
    ),
    "hunyuan_a13b": replace(
        _THINK,
        signs=(("<answer>", "think>"), ("<|extra_0|>", "think>"), ("<\uff5chy_", "think>")),
        answers=(("<answer>", "</answer>"),),
    ),
    "deepseek_r1": replace(_THINK, signs=(("<\uff5cAssistant\uff5c>", "think>"),), is_open=True),
    "qwen3": replace(_THINK, signs=(*_THINK.signs, ("detailed thinking",))),
}
"""The formats of blocks by name, in the order in which a template is compared with them."""
