"""Formats of whole answers: what a model writes around its content and its calls.

`forms_of` returns those of a reasoning parser: a block of thoughts, or gpt-oss's messages.
"""

from __future__ import annotations

from typing import Literal, Protocol

from engine.server.harmony import CHANNEL
from engine.server.reasoning.formats import FORMATS, Block
from engine.server.tool_parsers import CallFormat
from engine.server.tool_parsers.call_grammar import Form, choice, const, sequence
from engine.server.tool_parsers.harmony import message_before
from engine.structured.lark import escaped

__all__ = ["HARMONY", "AnswerForms", "BlockForms", "Opening", "PlainForms", "forms_of"]

Opening = Literal["open", "may open", "closed"]
"""State of the reasoning where an answer begins."""

HARMONY = "harmony"
"""Name of the parsers of gpt-oss, whose calls and reasoning are messages of one format."""

_TEXT: Form = {"type": "any_text"}
_SPACE: Form = {"type": "regex", "pattern": r"\s{0,8}"}  # white space before the answer


class AnswerForms(Protocol):
    """Builds the format of an answer from those of its content and calls."""

    def content(self, content: Form) -> Form:
        """Return content behind reasoning, with the markers that the model writes around it."""

    def call(self, call: Form) -> Form:
        """Return a required call that no reasoning precedes."""

    def text(self, calls: CallFormat, opening: Opening, *, one_call: bool) -> Form:
        """Return free text with calls."""

    def after_reasoning(self, form: Form, alone: Form, opening: Opening) -> Form:
        """Return a format behind free reasoning, or `alone` if the answer need not have any."""


class PlainForms:
    """`AnswerForms` of a model without reasoning."""

    def content(self, content: Form) -> Form:
        """Return the content."""
        return content

    def call(self, call: Form) -> Form:
        """Return the call."""
        return call

    def text(self, calls: CallFormat, opening: Opening, *, one_call: bool) -> Form:
        """Return free text with calls."""
        return calls.within_text(one_call=one_call)

    def after_reasoning(self, form: Form, alone: Form, opening: Opening) -> Form:
        """Return `alone`: there is no reasoning."""
        return alone


class BlockForms(PlainForms):
    """`AnswerForms` of a model that thinks in a block.

    Parameters
    ----------
    block : Block
    """

    def __init__(self, block: Block) -> None:
        self._block = block

    def content(self, content: Form) -> Form:
        """Return content, also between the markers of answers."""
        block = self._block
        options = [sequence(const(b), _SPACE, content, const(e)) for b, e in block.answers]
        if block.end:  # no optional text: free text would not end with it
            options.append(sequence(content, const(block.end)))
        return choice([content, *options])

    def text(self, calls: CallFormat, opening: Opening, *, one_call: bool) -> Form:
        """Return free text with calls, which is no block if the answer may open one."""
        excludes = []
        if opening == "may open":
            markers = "|".join(map(escaped, self._block.opening))
            excludes.append(rf"\s*(?:{markers})(?s:.*)")
        return calls.within_text(one_call=one_call, excludes=excludes)

    def after_reasoning(self, form: Form, alone: Form, opening: Opening) -> Form:
        """Return a format behind a block."""
        rest = sequence(choice([_before(marker) for marker in self._block.closing]), _SPACE)
        if opening == "open":
            return sequence(rest, form)
        thought = sequence(choice([const(marker) for marker in self._block.opening]), rest)
        if form == alone:
            return sequence({"type": "optional", "content": thought}, form)
        return choice([sequence(thought, form), alone])


class _HarmonyForms:
    """`AnswerForms` of gpt-oss."""

    _next = const("<|start|>assistant")

    def content(self, content: Form) -> Form:
        """Return content as the final message."""
        return sequence(const(f"{CHANNEL}final<|message|>"), content)

    def call(self, call: Form) -> Form:
        """Return a message to a function, after the end of the one that the prompt has begun."""
        return sequence(const("<|end|>"), self._next, call)

    def text(self, calls: CallFormat, opening: Opening, *, one_call: bool) -> Form:
        """Return messages, of which the last may be a call."""
        text = calls.within_text(one_call=one_call)
        if opening != "closed":
            return text
        return choice([_TEXT, sequence(_before("<|end|>"), self._next, text)])

    def after_reasoning(self, form: Form, alone: Form, opening: Opening) -> Form:
        """Return a message behind those of the analysis."""
        more: Form = {"type": "star", "content": message_before("analysis")}
        begun = [_before("<|end|>"), self._next] if opening == "open" else []
        return sequence(*begun, more, form)


def forms_of(reasoning_parser: str | None) -> AnswerForms:
    """Return the formats of answers that a reasoning parser reads."""
    if reasoning_parser is None:
        return PlainForms()
    if reasoning_parser == HARMONY:
        return _HarmonyForms()
    return BlockForms(FORMATS[reasoning_parser])


def _before(end: str) -> Form:
    """Return free text up to a marker, and the marker."""
    return {"type": "tag", "begin": "", "content": _TEXT, "end": end}
