"""Tools of a request, and which of them an answer may or has to call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from engine.checks import shown
from engine.server.protocol.common import UNREAD
from engine.server.protocol.errors import APIError
from engine.server.tool_parsers import MAX_CALLS, Function

__all__ = [
    "Choice",
    "FunctionDefinition",
    "Tool",
    "ToolChoice",
    "ToolSelection",
    "selected_tools",
    "tools_schema",
]


class FunctionDefinition(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Function that the model may call; `parameters` is the JSON schema of an object."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Tool; only functions are supported."""

    function: FunctionDefinition
    type: Literal["function"] | None = None
    cache_control: msgspec.Raw = UNREAD


class ToolName(msgspec.Struct, forbid_unknown_fields=True):
    """Name of a function."""

    name: str


class AllowedTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One of the tools that an `AllowedTools` names."""

    function: ToolName
    type: Literal["function"] | None = None


class AllowedTools(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The tools that may be called, and whether one has to be."""

    tools: list[AllowedTool]
    mode: Literal["auto", "required"] | None = None


class ToolChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`tool_choice` that names the tool to call, or those that may be called."""

    type: Literal["function", "allowed_tools"] | None = None
    function: ToolName | None = None
    allowed_tools: AllowedTools | None = None


Choice = Literal["none", "auto", "required"] | ToolChoice
"""A request's `tool_choice`."""


@dataclass(frozen=True)
class ToolSelection:
    """The tools that an answer may call.

    Attributes
    ----------
    mode : str
        "none", "auto", "required" or "named": one tool, which has to be called.
    tools : list of (int, Tool)
        With their indices in the request.
    is_subset : bool
        Whether the request has other tools too.
    """

    mode: str
    tools: list[tuple[int, Tool]]
    is_subset: bool = False


def selected_tools(defined: Sequence[Tool] | None, chosen: Choice | None) -> ToolSelection:
    """Return the tools that an answer may call, given a request's `tools` and `tool_choice`.

    Raises
    ------
    APIError
        If `tool_choice` is invalid, or names or requires a tool that the request does not define.
    """
    tools = list(enumerate(defined or []))
    if not tools and chosen not in (None, "none", "auto"):
        message = "tool_choice needs tools; the request has none"
        raise APIError(400, message, param="tool_choice")
    if not tools or chosen == "none":
        return ToolSelection("none", [])
    if not isinstance(chosen, ToolChoice):
        return ToolSelection(chosen or "auto", tools)
    given = {name for name in ("function", "allowed_tools") if getattr(chosen, name) is not None}
    kind = chosen.type or "function"
    if given != {kind}:
        message = f"tool_choice must have the field {kind} and no other beside type"
        raise APIError(400, message, param="tool_choice")
    if chosen.function is not None:
        return _selection("named", [chosen.function.name], tools)
    assert chosen.allowed_tools is not None  # as its type says
    names = [tool.function.name for tool in chosen.allowed_tools.tools]
    return _selection(chosen.allowed_tools.mode or "auto", names, tools)


def _selection(mode: str, names: Sequence[str], tools: list[tuple[int, Tool]]) -> ToolSelection:
    known = {tool.function.name: (i, tool) for i, tool in tools}
    for name in names:
        if name not in known:
            listed = ", ".join(known)[:200]
            message = f"tool_choice must name one of the tools ({listed}); got {shown(name)}"
            raise APIError(400, message, param="tool_choice")
    if not names:
        message = "tool_choice.allowed_tools.tools must not be empty"
        raise APIError(400, message, param="tool_choice")
    found = [known[name] for name in dict.fromkeys(names)]
    return ToolSelection(mode, found, is_subset=len(found) < len(known))


def tools_schema(functions: Sequence[Function], *, one_call: bool) -> dict[str, Any]:
    """Return the JSON schema of a non-empty array of calls to these functions.

    The schema of each function's arguments stays a document of its own: "#" is its root.
    """
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": function.name},
                "arguments": function.schema,
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for function in functions
    ]
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    return schema | {"maxItems": 1 if one_call else MAX_CALLS}
