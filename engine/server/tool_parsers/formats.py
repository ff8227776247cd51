"""The formats of tool calls: which templates have each, and how an answer is read."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

from engine.server.tool_parsers._parser import StateParser
from engine.server.tool_parsers.events import random_id
from engine.server.tool_parsers.harmony import HarmonyParser
from engine.server.tool_parsers.hermes import HermesParser
from engine.server.tool_parsers.llama3_json import Llama3JsonParser
from engine.server.tool_parsers.mistral import MistralParser, short_id
from engine.server.tool_parsers.tagged import TaggedParser, Tags

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


_QWEN3_CODER = Tags(
    ("<tool_call>", "</tool_call>"),
    *("<function=", (">",), "<parameter=", ">", "</parameter>", "</function>"),
    trims=True,
    is_bare=True,
)
_GLM45 = Tags(
    ("", ""),
    "<tool_call>",
    ("\n", "<arg_key>", "</tool_call>"),
    *("<arg_key>", "<arg_value>", "</arg_value>", "</tool_call>"),
    key_name=re.compile(r"\s*(.+?)\s*</arg_key>\s*"),
)
_HY_V3 = Tags(
    ("<tool_calls>", "</tool_calls>"),
    *("<tool_call>", ("<tool_sep>",)),
    *("<arg_key>", "<arg_value>", "</arg_value>", "</tool_call>"),
    key_name=re.compile(r"\s*(.+?)\s*</arg_key>\s*"),
)
_IN_QUOTES = re.compile(r'(.+?)"\s*')
_MINIMAX_M2 = Tags(
    ("<minimax:tool_call>", "</minimax:tool_call>"),
    *('<invoke name="', (">",), '<parameter name="', ">", "</parameter>", "</invoke>"),
    name=_IN_QUOTES,
    key_name=_IN_QUOTES,
)
_DSML = "\uff5cDSML\uff5c"
_DEEPSEEK_V32 = Tags(
    (f"<{_DSML}function_calls>", f"</{_DSML}function_calls>"),
    *(f'<{_DSML}invoke name="', (">",), f'<{_DSML}parameter name="', ">"),
    *(f"</{_DSML}parameter>", f"</{_DSML}invoke>"),
    name=_IN_QUOTES,
    key_name=re.compile(r'(.+?)"\s+string="(true|false)"\s*'),
)
_SEED_OSS = Tags(
    ("<seed:tool_call>", "</seed:tool_call>"),
    *("<function=", (">",), "<parameter=", ">", "</parameter>", "</function>"),
)


def _tagged(tags: Tags, *signs: str) -> Format:
    return Format(partial(TaggedParser, tags), (signs,))


FORMATS: dict[str, Format] = {
    "harmony": Format(HarmonyParser, (("<|channel|>",),)),
    "mistral": Format(MistralParser, (("[TOOL_CALLS]",),), short_id),
    "llama3_json": Format(
        Llama3JsonParser, (("<|python_tag|>",), ("<|start_header_id|>", '"parameters"'))
    ),
    "minimax_m2": _tagged(_MINIMAX_M2, "minimax:tool_call"),
    "deepseek_v32": _tagged(_DEEPSEEK_V32, _DSML),
    "seed_oss": _tagged(_SEED_OSS, "<seed:tool_call>"),
    "hy_v3": _tagged(_HY_V3, "<tool_sep>", "<arg_key>"),
    "glm45": _tagged(_GLM45, "<arg_key>"),
    "qwen3_coder": _tagged(_QWEN3_CODER, "<function="),
    "hermes": Format(HermesParser, (("<tool_call>",),)),
}
"""The formats by name, in the order in which a template is compared with them."""
