"""The formats of tool calls: which templates have each, and how an answer is read."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from engine.server.tool_parsers._parser import StateParser
from engine.server.tool_parsers.events import random_id
from engine.server.tool_parsers.harmony import HarmonyParser
from engine.server.tool_parsers.hermes import HermesParser
from engine.server.tool_parsers.llama3_json import Llama3JsonParser
from engine.server.tool_parsers.mistral import MistralParser, short_id

__all__ = ["FORMATS", "Format"]


@dataclass(frozen=True)
class Format:
    """One format of tool calls.

    Attributes
    ----------
    parser : callable
        Returns a parser of one answer, given the functions that may be called: their names or, in
        formats whose values have no type of their own, a mapping to the schemas of their
        parameters; None allows all.
    signs : tuple of tuple of str
        A chat template that contains all strings of one of them has this format, unless it has one
        of the formats before this in `FORMATS`.
    make_id : callable
        Returns a new id of a call.
    """

    parser: Callable[[Collection[str] | None], StateParser]
    signs: tuple[tuple[str, ...], ...]
    make_id: Callable[[], str] = random_id

    def is_used_by(self, chat_template: str) -> bool:
        """Tell whether the template contains the signs of this format."""
        return any(all(sign in chat_template for sign in signs) for signs in self.signs)


FORMATS: dict[str, Format] = {
    "harmony": Format(HarmonyParser, (("<|channel|>",),)),
    "mistral": Format(MistralParser, (("[TOOL_CALLS]",),), short_id),
    "llama3_json": Format(
        Llama3JsonParser, (("<|python_tag|>",), ("<|start_header_id|>", '"parameters"'))
    ),
    "hermes": Format(HermesParser, (("<tool_call>",),)),
}
"""The formats by name, in the order in which a template is compared with them."""
