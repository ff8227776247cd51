"""Constraints of an answer: reasoning, then text, JSON or calls in the model's format."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import RequestError
from engine.server import reasoning, tool_parsers
from engine.server.answer_forms import HARMONY, AnswerForms, Opening
from engine.server.protocol.chat import ChatCompletionRequest
from engine.server.protocol.common import structured_options
from engine.server.protocol.errors import APIError
from engine.server.protocol.tools import selected_tools, tools_schema
from engine.server.response_template import DeclaredReaders
from engine.server.tool_parsers import CallFormat, Event, ToolParser
from engine.server.tool_parsers.call_grammar import Form, Function, choice
from engine.server.tool_parsers.events import ToolCallDelta, ToolCallEnd, ToolCallStart
from engine.server.tool_parsers.json_scanner import is_json_object
from engine.server.tool_parsers.required import RequiredCallsParser
from engine.structured.lark import escaped
from engine.structured.spec import StructuredOutput

__all__ = ["ToolUse", "answer_structure", "opening_of", "tool_use"]


@dataclass(frozen=True)
class ToolUse:
    """How an answer may call tools.

    Attributes
    ----------
    make_parser : callable or None
        Returns a parser of the answer's calls; None: text is never a call.
    calls : CallFormat or None
        Grammar of the calls, if the format has one and the answer needs it.
    mode : str
        "none", "auto", "required" or "named".
    is_constrained : bool
        Whether the calls of "auto" follow the grammar, if there is one.
    one_call : bool
    schema : mapping or None
        JSON schema of the answer, if calls are required in a format without a grammar.
    """

    make_parser: Callable[[], ToolParser] | None = None
    calls: CallFormat | None = None
    mode: str = "none"
    is_constrained: bool = False
    one_call: bool = False
    schema: Mapping[str, Any] | None = None


def tool_use(
    body: ChatCompletionRequest,
    tool_parser: str | None,
    reasoning_parser: str | None,
    *,
    follows_text: bool,
    declared: DeclaredReaders | None = None,
    allows_auto: bool = True,
) -> ToolUse:
    """Return how the answer to a request may call tools.

    Parameters
    ----------
    body : ChatCompletionRequest
    tool_parser, reasoning_parser : str or None
        Names of the model's parsers.
    follows_text : bool
        Whether the answer continues a message with text.
    declared : DeclaredReaders, optional
        Readers of answers in the checkpoint's own format, if that is used.
    allows_auto : bool
        The server's `enable_auto_tool_choice`.

    Raises
    ------
    APIError
        If `tool_choice` is invalid, or a tool parser is needed and there is none.
    """
    selected = selected_tools(body.tools, body.tool_choice)
    mode = selected.mode
    if mode == "none":
        return ToolUse()
    one_call = body.parallel_tool_calls is False or mode == "named"
    is_required = mode != "auto"
    functions = [
        Function(
            tool.function.name,
            tool.function.parameters or {},
            f"tools[{i}].function.parameters",
            is_required or bool(tool.function.strict),
        )
        for i, tool in selected.tools
    ]
    names = {function.name: function.parameters for function in functions}
    is_constrained = selected.is_subset or any(function.is_strict for function in functions)
    has_grammar = is_required or is_constrained or structured_options(body) is not None
    can_read = tool_parser != HARMONY or reasoning_parser == HARMONY
    if declared is None:
        calls = tool_parsers.calls_of(tool_parser, functions) if has_grammar and can_read else None
    else:
        has_grammar = is_required or (is_constrained and structured_options(body) is None)
        calls = declared.calls(functions) if has_grammar else None
    if is_required and calls is None:
        return _calls_as_json(functions, mode, tool_parser, one_call=one_call)
    if tool_parser is None:
        why = (
            "none is known for the model's chat template; start the server with --tool-call-parser"
            if allows_auto
            else "the server was started with --no-enable-auto-tool-choice; leave that out"
        )
        message = f'tools need a tool parser, and {why}, or give tool_choice "required"'
        raise APIError(400, message, param="tools")
    make: Callable[[], ToolParser]
    if declared is not None:
        make = functools.partial(declared.tools, tool_parsers.id_maker(tool_parser))
    else:
        make = functools.partial(
            tool_parsers.get, tool_parser, names, follows_text=follows_text and not is_required
        )
    if is_required:
        make = functools.partial(RequiredCallsParser, make)
    return ToolUse(make, calls, mode, is_constrained, one_call)


def _calls_as_json(
    functions: Sequence[Function], mode: str, tool_parser: str | None, *, one_call: bool
) -> ToolUse:
    """Return the use of tools in an answer of JSON: a list of calls, or the arguments of one."""
    make_id = tool_parsers.id_maker(tool_parser)
    if mode == "named":
        [function] = functions
        make = functools.partial(_NamedCall, function.name, make_id)
        return ToolUse(make, mode=mode, one_call=True, schema=function.schema)
    names = {function.name: function.parameters for function in functions}
    make_list = functools.partial(tool_parsers.CallListParser, names, make_id)
    schema = tools_schema(functions, one_call=one_call)
    return ToolUse(make_list, mode=mode, one_call=one_call, schema=schema)


def opening_of(name: str | None, prompt: str, continued: str = "") -> Opening:
    """Return the state of the block where the answer to a prompt begins.

    Parameters
    ----------
    name : str or None
        The reasoning parser, if any.
    prompt, continued : str
        See `reasoning.get`.

    Examples
    --------
    >>> [opening_of("qwen3", prompt) for prompt in ("<think>\\n", "", "</think>")]
    ['open', 'may open', 'closed']
    """
    if name is None:
        return "closed"
    reader = reasoning.get(name, prompt, continued=continued)
    if not reader.is_reasoning:
        return "closed"
    thought, _ = reader.feed("x")
    return "open" if thought else "may open"


def answer_structure(
    body: ChatCompletionRequest, use: ToolUse, forms: AnswerForms, opening: Opening
) -> dict[str, Any] | None:
    """Return the fields of the `StructuredOutput` of an answer; None: it is free text.

    Parameters
    ----------
    body : ChatCompletionRequest
    use : ToolUse
    forms : AnswerForms
        The model's formats of answers.
    opening : str
        See `opening_of`.

    Raises
    ------
    APIError, RequestError
        If several fields of the request ask for a structure, or one is invalid.
    """
    options = structured_options(body)
    if use.schema is not None:
        options = {"json": use.schema}
    is_required = use.mode in ("required", "named")
    behind: list[Form] = []  # formats of the answer after a block of reasoning
    alone: list[Form] = []  # formats of an answer without a block
    if options is not None and not (is_required and use.calls is not None):
        if use.calls is None and opening == "closed":
            return options
        content = _form_of(options, any_whitespace=use.calls is None)
        alone.append(content)
        behind.append(forms.content(content))
    if use.calls is not None and (is_required or options is not None):
        call = use.calls.required(one_call=use.one_call)
        alone.append(forms.call(call))
        behind.append(call)
    elif use.calls is not None and use.is_constrained:
        text = forms.text(use.calls, opening, one_call=use.one_call)
        alone.append(text)
        behind.append(text)
    if not alone:
        return None
    form = choice(alone)
    if opening != "closed":
        form = forms.after_reasoning(choice(behind), form, opening)
    return {"structural_tag": _tag_text(form)}


def _tag_text(form: Form) -> str:
    """Return a structural tag as text.

    `StructuredOutput` writes a dict ten times as slowly, in Python, to stop at its limit.
    """
    tag = {"type": "structural_tag", "format": form}
    try:
        return json.dumps(tag, ensure_ascii=False, separators=(",", ":"))
    except RecursionError:
        raise RequestError("a JSON schema of the request nests too deeply") from None


def _form_of(options: Mapping[str, Any], *, any_whitespace: bool) -> Form:
    """Return the format of the text that the fields of a `StructuredOutput` describe."""
    structured = StructuredOutput(**options)
    if structured.regex is not None:
        return {"type": "regex", "pattern": structured.regex}
    if structured.choice is not None:
        return {"type": "regex", "pattern": "|".join(map(escaped, structured.choice))}
    if structured.grammar is not None:
        return {"type": "grammar", "grammar": structured.grammar}
    if structured.structural_tag is not None:
        return json.loads(str(structured.structural_tag)).get("format")  # type: ignore[no-any-return]
    schema = {"type": "object"} if structured.json_object else json.loads(str(structured.json))
    return {"type": "json_schema", "json_schema": schema, "any_whitespace": any_whitespace}


class _NamedCall:
    """Parser for an answer that consists entirely of one call's arguments."""

    markers: tuple[str, ...] = ()

    def __init__(self, name: str, make_id: Callable[[], str]) -> None:
        self._start = ToolCallStart(0, make_id(), name)
        self._arguments: list[str] = []

    def feed(self, delta: str) -> list[Event]:
        """Return the delta as arguments; the first time, preceded by the call's start event."""
        events: list[Event] = [] if self._arguments else [self._start]
        self._arguments.append(delta)
        return [*events, ToolCallDelta(0, delta)]

    def finish(self) -> list[Event]:
        """Return the call's end event, if the call has started."""
        if not self._arguments:
            return []
        return [ToolCallEnd(0, is_json_object("".join(self._arguments)))]
