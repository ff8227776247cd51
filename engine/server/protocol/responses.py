"""/v1/responses: request body, and its conversion to a /v1/chat/completions request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from engine.checks import shown
from engine.errors import RequestError
from engine.server.protocol.common import UNREAD, is_given, shown_field
from engine.server.protocol.items import MAX_ITEMS, text_of, typed_item, typed_items

__all__ = ["ResponsesRequest", "own_items", "to_chat"]

_Label = str | None


class ReasoningOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Reasoning effort; the model's chat template decides how to use it."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponseStreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`stream_options`; events are never obfuscated."""

    include_obfuscation: bool | None = None


class TextOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Format of the output text."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Request body of POST /v1/responses.

    Fields that only label a request (`metadata`, `user`, `prompt_cache_key`, ...) have no effect.
    `to_chat` rejects unsupported fields.
    """

    model: str | None = None
    input: str | list[Any]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    stream: bool | None = None
    # labels: accepted and ignored
    metadata: dict[str, str] | None = None
    user: _Label = None
    safety_identifier: _Label = None
    prompt_cache_key: _Label = None
    prompt_cache_retention: _Label = None
    # accepted if responses are stored
    store: bool | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    # accepted only if they have no effect
    conversation: msgspec.Raw = UNREAD
    prompt: msgspec.Raw = UNREAD
    include: list[str] | None = None
    max_tool_calls: int | None = None
    service_tier: str | None = None
    stream_options: ResponseStreamOptions | None = None
    top_logprobs: int | None = None
    truncation: str | None = None


# ---- input items


class _TextPart(msgspec.Struct):
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class _RefusalPart(msgspec.Struct):
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class _Message(msgspec.Struct):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Any]
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class _FunctionCall(msgspec.Struct):
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None


class _FunctionCallOutput(msgspec.Struct):
    call_id: str
    output: str | list[Any]
    id: str | None = None
    status: str | None = None


class _Reasoning(msgspec.Struct):
    id: str | None = None
    summary: list[Any] = []
    content: list[Any] = []
    encrypted_content: str | None = None
    status: str | None = None


_ITEMS: dict[str, type[Any]] = {
    "message": _Message,
    "function_call": _FunctionCall,
    "function_call_output": _FunctionCallOutput,
    "reasoning": _Reasoning,
}
_INPUT_PARTS: dict[str, type[Any]] = {"input_text": _TextPart}
_OUTPUT_PARTS: dict[str, type[Any]] = {
    "output_text": _TextPart,
    "input_text": _TextPart,
    "refusal": _RefusalPart,
}
_REASONING_PARTS: dict[str, type[Any]] = {"reasoning_text": _TextPart, "summary_text": _TextPart}


class _FunctionTool(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _NamedFunction(msgspec.Struct):
    name: str


class _AllowedTools(msgspec.Struct):
    tools: list[Any]
    mode: Literal["auto", "required"] = "auto"


class _TextFormat(msgspec.Struct):
    pass


class _SchemaFormat(msgspec.Struct):
    name: str
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


_FORMATS: dict[str, type[Any]] = {
    "text": _TextFormat,
    "json_object": _TextFormat,
    "json_schema": _SchemaFormat,
}


# ---- conversion


def own_items(request: ResponsesRequest) -> list[Any]:
    """Return the items of a request's own input; a text is a message of the user."""
    if isinstance(request.input, str):
        return [{"role": "user", "content": request.input}]
    return request.input


def to_chat(
    request: ResponsesRequest, earlier: Sequence[Any] = (), *, can_store: bool = False
) -> dict[str, Any]:
    """Convert to an equivalent /v1/chat/completions request body.

    Parameters
    ----------
    request : ResponsesRequest
    earlier : sequence
        Items that precede the input: those up to the end of the previous response.
    can_store : bool
        Whether the server stores responses.

    Raises
    ------
    RequestError
        If an item or a field is invalid or unsupported.
    """
    if not can_store:
        _refuse_storing(request)
    _refuse_unsupported(request)
    if request.max_output_tokens is not None and request.max_output_tokens < 1:
        raise RequestError(f"max_output_tokens must be at least 1; got {request.max_output_tokens}")
    body: dict[str, Any] = {
        "model": request.model,
        "messages": _messages(request, earlier),
        "max_completion_tokens": request.max_output_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "stream": request.stream,
        "parallel_tool_calls": request.parallel_tool_calls,
        "reasoning_effort": request.reasoning.effort if request.reasoning else None,
        "response_format": _response_format(request.text),
    }
    if request.tools:
        body["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools)]
        body["tool_choice"] = _tool_choice(request.tool_choice)
    elif request.tool_choice not in (None, "auto", "none"):
        raise RequestError(f"tool_choice needs tools; got {shown(request.tool_choice)}")
    return {name: value for name, value in body.items() if value is not None}


def _refuse_storing(request: ResponsesRequest) -> None:
    reason = "no responses are stored (max_stored_responses)"
    _refuse_others(
        ("store", request.store, (False,), reason),
        ("previous_response_id", request.previous_response_id, (), f"{reason}; "
         "send the earlier items in input"),
        ("background", request.background, (False,), reason),
    )  # fmt: skip


def _refuse_unsupported(request: ResponsesRequest) -> None:
    text = request.text or TextOptions()
    if request.background:
        reason = "a background response is asked for again, by its id"
        _refuse_others(("store", request.store, (True,), reason))
    _refuse_others(
        ("conversation", request.conversation, (), "no conversations are stored"),
        ("prompt", request.prompt, (), "no prompts are stored"),
        ("max_tool_calls", request.max_tool_calls, (), "there are no built-in tools"),
        ("service_tier", request.service_tier, ("auto", "default"), "there is one tier"),
        ("stream_options.include_obfuscation",
         request.stream_options and request.stream_options.include_obfuscation, (False,),
         "events are not obfuscated"),
        ("top_logprobs", request.top_logprobs, (0,), "log-probabilities are in /v1/completions "
         "and /v1/chat/completions"),
        ("truncation", request.truncation, ("disabled",), "the input is never truncated"),
        ("text.verbosity", text.verbosity, ("medium",), "models have no verbosity"),
    )  # fmt: skip
    for name in request.include or ():
        # Encrypted reasoning is not needed: clients send reasoning back as plain text.
        if name != "reasoning.encrypted_content":
            raise RequestError(f"include must be empty; got {shown(name)}")


def _refuse_others(*fields: tuple[str, object, tuple[object, ...], str]) -> None:
    """Raise for the first of (field, value, accepted values, reason) with another value."""
    for name, value, fine, why in fields:
        if is_given(value) and value not in fine:
            wanted = " or ".join(["null", *(shown(each) for each in fine)])
            raise RequestError(f"{name} must be {wanted}: {why}; got {shown_field(value)}")


def _messages(request: ResponsesRequest, earlier: Sequence[Any]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    own = own_items(request)
    if len(earlier) + len(own) > MAX_ITEMS:
        before = f" after {len(earlier)} of previous responses" if earlier else ""
        raise RequestError(f"input must have at most {MAX_ITEMS} items; got {len(own)}{before}")
    named = [(f"item {i} of the previous responses", item) for i, item in enumerate(earlier)]
    named += [(f"input[{i}]", item) for i, item in enumerate(own)]
    for where, given in named:
        item = typed_item(given, _ITEMS, where, default="message")
        _add_item(messages, item, where)
    if not messages:
        raise RequestError("input must not be empty")
    for message in messages:
        if set(message) == {"role", "reasoning_content"}:
            message["content"] = ""  # the answer stopped during reasoning
    return messages


def _add_item(messages: list[dict[str, Any]], item: Any, where: str) -> None:
    """Append an input item; all items of an assistant turn become one message."""
    if isinstance(item, _FunctionCall):
        function = {"name": item.name, "arguments": item.arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        _assistant(messages, is_text=False).setdefault("tool_calls", []).append(call)
    elif isinstance(item, _FunctionCallOutput):
        content = text_of(item.output, _INPUT_PARTS, f"{where}.output")
        messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
    elif isinstance(item, _Reasoning):
        kind = "content" if item.content else "summary"
        text = text_of(getattr(item, kind), _REASONING_PARTS, f"{where}.{kind}")
        if text and messages and set(messages[-1]) == {"role", "reasoning_content"}:
            messages[-1]["reasoning_content"] += f"\n{text}"
        elif text:
            messages.append({"role": "assistant", "reasoning_content": text})
    elif item.role == "assistant":
        content = text_of(item.content, _OUTPUT_PARTS, f"{where}.content")
        message = _assistant(messages, is_text=True)
        message["content"] = "\n".join(filter(None, (message.get("content"), content)))
    else:
        content = text_of(item.content, _INPUT_PARTS, f"{where}.content")
        role = "user" if item.role == "user" else "system"
        if role == "system" and messages and messages[-1]["role"] == "system":
            messages[-1]["content"] += f"\n\n{content}"
        else:
            messages.append({"role": role, "content": content})


def _assistant(messages: list[dict[str, Any]], *, is_text: bool) -> dict[str, Any]:
    """Return the assistant message to add a text or call to.

    A second text starts a new message, unless a call between the two makes them one turn: many
    templates want the results right behind the message of their calls.
    """
    last = messages[-1] if messages else {}
    has_room = not is_text or "content" not in last or "tool_calls" in last
    if last.get("role") != "assistant" or not has_room:
        messages.append({"role": "assistant"})
    return messages[-1]


def _tool(given: object, where: str) -> dict[str, Any]:
    tool = typed_item(given, {"function": _FunctionTool}, where)
    function = {"name": tool.name, "description": tool.description, "strict": tool.strict}
    found = {name: value for name, value in function.items() if value is not None}
    return {"type": "function", "function": found | {"parameters": tool.parameters or {}}}


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if choice is None or choice in ("auto", "none", "required"):
        return choice
    if isinstance(choice, dict) and choice.get("type") == "function":
        named = typed_item(choice, {"function": _NamedFunction}, "tool_choice")
        return {"type": "function", "function": {"name": named.name}}
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        given = typed_item(choice, {"allowed_tools": _AllowedTools}, "tool_choice")
        tools = [
            {"type": "function", "function": {"name": tool.name}}
            for tool in typed_items(given.tools, {"function": _NamedFunction}, "tool_choice.tools")
        ]
        allowed = {"mode": given.mode, "tools": tools}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    raise RequestError(
        'tool_choice must be "auto", "none", "required", {"type": "function", "name": ...} or '
        f'{{"type": "allowed_tools", "mode": ..., "tools": [...]}}; got {shown(choice)}'
    )


def _response_format(text: TextOptions | None) -> dict[str, Any] | None:
    if text is None or text.format is None:
        return None
    found = typed_item(text.format, _FORMATS, "text.format")
    kind = text.format["type"]
    if kind != "json_schema":
        return None if kind == "text" else {"type": kind}
    schema = {"name": found.name, "schema": found.schema, "strict": found.strict}
    return {
        "type": kind,
        "json_schema": {name: value for name, value in schema.items() if value is not None},
    }
