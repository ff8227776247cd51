"""The formats of tool calls: which templates have each, and how an answer is read."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

from engine.server.tool_parsers._parser import StateParser
from engine.server.tool_parsers.call_grammar import CallFormat, Function
from engine.server.tool_parsers.events import random_id
from engine.server.tool_parsers.harmony import HarmonyCalls, HarmonyParser
from engine.server.tool_parsers.llama3_json import Llama3JsonParser, llama3_json_calls
from engine.server.tool_parsers.marked_json import MarkedJsonParser, Marks, marked_calls
from engine.server.tool_parsers.mistral import MistralParser, mistral_calls, short_id
from engine.server.tool_parsers.pythonic import CallSyntax, PythonicParser, pythonic_calls
from engine.server.tool_parsers.tagged import TaggedParser, Tags, tagged_calls

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
    calls : callable or None
        Returns the grammar of calls of the given functions; None: answers cannot be constrained to
        calls of this format.
    """

    parser: Callable[[Collection[str] | None], StateParser]
    signs: tuple[tuple[str, ...], ...]
    make_id: Callable[[], str] = random_id
    calls: Callable[[Sequence[Function]], CallFormat] | None = None

    def is_used_by(self, chat_template: str) -> bool:
        """Tell whether the template contains the signs of this format."""
        return any(all(sign in chat_template for sign in signs) for signs in self.signs)


_QWEN3_CODER = Tags(
    section=("<tool_call>", "</tool_call>"),
    call="<function=",
    name_ends=(">",),
    key="<parameter=",
    value=">",
    close="</parameter>",
    done="</function>",
    trims=True,
    is_bare=True,
    is_single=True,
)
_SEED_OSS = replace(
    _QWEN3_CODER, section=("<seed:tool_call>", "</seed:tool_call>"), trims=False, is_bare=False
)
_GLM45 = Tags(
    section=("", ""),
    call="<tool_call>",
    name_ends=("\n", "<arg_key>", "</tool_call>"),
    key="<arg_key>",
    value="<arg_value>",
    close="</arg_value>",
    done="</tool_call>",
    key_name=re.compile(r"\s*(.+?)\s*</arg_key>\s*"),
    written_name="$name",
    written_key="{key}</arg_key>\n<arg_value>",
)
_HY_V3 = replace(
    _GLM45,
    section=("<tool_calls>", "</tool_calls>"),
    name_ends=("<tool_sep>",),
    written_name="$name<tool_sep>",
)
_IN_QUOTES = re.compile(r'(.+?)"\s*')
_MINIMAX_M2 = Tags(
    section=("<minimax:tool_call>", "</minimax:tool_call>"),
    call='<invoke name="',
    name_ends=(">",),
    name=_IN_QUOTES,
    key='<parameter name="',
    value=">",
    key_name=_IN_QUOTES,
    close="</parameter>",
    done="</invoke>",
    written_name='$name">',
    written_key='{key}">',
)
_DSML = "\uff5cDSML\uff5c"
_DEEPSEEK_V32 = Tags(
    section=(f"<{_DSML}function_calls>", f"</{_DSML}function_calls>"),
    call=f'<{_DSML}invoke name="',
    name_ends=(">",),
    name=_IN_QUOTES,
    key=f'<{_DSML}parameter name="',
    value=">",
    key_name=re.compile(r'(.+?)"\s+string="(true|false)"\s*'),
    close=f"</{_DSML}parameter>",
    done=f"</{_DSML}invoke>",
    written_name='$name">',
    written_key='{key}" string="true">',
    written_key_of_json='{key}" string="false">',
)

_DEEPSEEK_V4 = replace(_DEEPSEEK_V32, section=(f"<{_DSML}tool_calls>", f"</{_DSML}tool_calls>"))

_ON_A_LINE = '\n{"name": "$name", "arguments": $arguments}\n'
_HERMES = Marks("<tool_call>", "</tool_call>", written=_ON_A_LINE)
_LONGCAT = Marks("<longcat_tool_call>", "</longcat_tool_call>", written=_ON_A_LINE)
_NEMOTRON = Marks("<TOOLCALL>", "</TOOLCALL>", is_array=True, between=" ")
_PHI4 = replace(_NEMOTRON, opening="<|tool_call|>", closing="<|/tool_call|>")
_FUNCTOOLS = replace(_NEMOTRON, opening="functools", closing="")
_GRANITE = replace(_NEMOTRON, opening="<|tool_call|>", closing="")
_HUNYUAN = replace(_NEMOTRON, opening="<tool_calls>", closing="</tool_calls>")
_APERTUS = replace(
    _NEMOTRON,
    opening="<|tools_prefix|>",
    closing="<|tools_suffix|>",
    is_keyed=True,
    written='{"$name": $arguments}',
)
_GIGACHAT3 = Marks("<|function_call|>", "")
_COHERE = replace(
    _NEMOTRON,
    opening="<|START_ACTION|>",
    closing="<|END_ACTION|>",
    written='{"tool_call_id": "$index", "tool_name": "$name", "parameters": $arguments}',
)
_KIMI_K2 = Marks(
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
    re.compile(r"(?P<id>\s*(?:functions\.)?(?P<name>.+?):\d+\s*)<\|tool_call_argument_begin\|>\s*"),
    ("<|tool_call_end|>",),
    written="functions.$name:$index<|tool_call_argument_begin|>$arguments",
    between="",
)


def _deepseek(what: str) -> str:
    return f"<\uff5ctool\u2581{what}\uff5c>"


_DEEPSEEK_CALLS = _deepseek("calls\u2581begin")
_DEEPSEEK_SEP = _deepseek("sep")
_DEEPSEEK_V31 = Marks(
    _DEEPSEEK_CALLS,
    _deepseek("calls\u2581end"),
    _deepseek("call\u2581begin"),
    re.compile(rf"\s*(?P<name>.+?)\s*{_DEEPSEEK_SEP}\s*"),
    (_deepseek("call\u2581end"),),
    written=f"$name{_DEEPSEEK_SEP}$arguments",
    between="",
)
_DEEPSEEK_V3 = replace(
    _DEEPSEEK_V31,
    head=re.compile(rf"\s*function{_DEEPSEEK_SEP}(?P<name>.+?)\s*```json\s*"),
    done=("```", *_DEEPSEEK_V31.done),
    written=f"function{_DEEPSEEK_SEP}$name\n```json\n$arguments\n```",
    between="\n",
)


_LLAMA4 = CallSyntax("<|python_start|>", "<|python_end|>", is_list=True, is_bare=True)
_LFM2 = CallSyntax("<|tool_call_start|>", "<|tool_call_end|>", is_list=True)
_OLMO3 = CallSyntax("<function_calls>", "</function_calls>")
_GEMMA4 = CallSyntax("<|tool_call>", "<tool_call|>", before="call:", opener="{", marker='<|"|>')
_FUNCTION_GEMMA = CallSyntax(
    *("<start_function_call>", "<end_function_call>"),
    before="call:",
    opener="{",
    marker="<escape>",
)


def _marked(marks: Marks, *signs: str) -> Format:
    return Format(partial(MarkedJsonParser, marks), (signs,), calls=partial(marked_calls, marks))


def _tagged(tags: Tags, *signs: str) -> Format:
    return Format(partial(TaggedParser, tags), (signs,), calls=partial(tagged_calls, tags))


def _pythonic(syntax: CallSyntax, *signs: str) -> Format:
    one_each = tuple((sign,) for sign in signs)
    calls = partial(pythonic_calls, syntax)
    return Format(partial(PythonicParser, syntax), one_each, calls=calls)


FORMATS: dict[str, Format] = {
    "harmony": Format(HarmonyParser, (("<|channel|>",),), calls=HarmonyCalls),
    "mistral": Format(MistralParser, (("[TOOL_CALLS]",),), short_id, mistral_calls),
    "llama4_pythonic": _pythonic(_LLAMA4, "[func_name1("),
    "llama3_json": Format(
        Llama3JsonParser,
        (
            ("<|python_tag|>",),
            ("<|start_header_id|>", '"parameters"'),
            ("<|header_start|>", '"parameters"'),
        ),
        calls=llama3_json_calls,
    ),
    "minimax_m2": _tagged(_MINIMAX_M2, "minimax:tool_call"),
    "deepseek_v4": _tagged(_DEEPSEEK_V4, _DSML, "tool_calls>\\n"),
    "deepseek_v32": _tagged(_DEEPSEEK_V32, _DSML),
    "seed_oss": _tagged(_SEED_OSS, "<seed:tool_call>"),
    "hy_v3": _tagged(_HY_V3, "<tool_sep>", "<arg_key>"),
    "glm45": _tagged(_GLM45, "<arg_key>"),
    "qwen3_coder": _tagged(_QWEN3_CODER, "<function="),
    "gemma4": _pythonic(_GEMMA4, "<|tool_call>"),
    "function_gemma": _pythonic(_FUNCTION_GEMMA, "<start_function_call>"),
    "olmo3": _pythonic(_OLMO3, "<function_calls>"),
    "kimi_k2": _marked(_KIMI_K2, "<|tool_calls_section_begin|>"),
    "deepseek_v3": _marked(_DEEPSEEK_V3, _DEEPSEEK_CALLS, "```json"),
    "deepseek_v31": _marked(_DEEPSEEK_V31, _DEEPSEEK_CALLS),
    "phi4": _marked(_PHI4, "<|/tool_call|>"),
    "functools": _marked(_FUNCTOOLS, "functools["),
    "granite": _marked(_GRANITE, "<|tool_call|>"),
    "nemotron": _marked(_NEMOTRON, "<TOOLCALL>"),
    "longcat": _marked(_LONGCAT, "<longcat_tool_call>"),
    "apertus": _marked(_APERTUS, "<|tools_prefix|>"),
    "gigachat3": _marked(_GIGACHAT3, "<|function_call|>"),
    "cohere": _marked(_COHERE, "<|START_ACTION|>"),
    "hunyuan_a13b": _marked(_HUNYUAN, "<tool_calls>"),
    "hermes": _marked(_HERMES, "<tool_call>"),
    "lfm2": _pythonic(_LFM2, "<|tool_call_start|>", "<|tool_list_start|>", "List of tools: ["),
}
"""The formats by name, in the order in which a template is compared with them."""
