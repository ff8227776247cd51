"""/v1/responses: request body, and its conversion to a /v1/chat/completions request.

Nothing is stored: `store: true`, `previous_response_id` and item references are rejected.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from engine.checks import shown
from engine.errors import RequestError
from engine.server.protocol.common import UNREAD, is_given, shown_field
from engine.server.protocol.items import MAX_ITEMS, text_of, typed_item

__all__ = ["ResponsesRequest", "to_chat"]

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
    # accepted only if they have no effect
    store: bool | None = None
    previous_response_id: str | None = None
    conversation: msgspec.Raw = UNREAD
    background: bool | None = None
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


def to_chat(request: ResponsesRequest) -> dict[str, Any]:
    """Convert to an equivalent /v1/chat/completions request body.

    Raises
    ------
    RequestError
        If an item or a field is invalid or unsupported.
    """
    _refuse_unsupported(request)
    if request.max_output_tokens is not None and request.max_output_tokens < 1:
        raise RequestError(f"max_output_tokens must be at least 1; got {request.max_output_tokens}")
    body: dict[str, Any] = {
        "model": request.model,
        "messages": _messages(request),
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


def _refuse_unsupported(request: ResponsesRequest) -> None:
    text = request.text or TextOptions()
    allowed: tuple[tuple[str, object, tuple[object, ...], str], ...] = (
        ("store", request.store, (False,), "no responses are stored"),
        ("previous_response_id", request.previous_response_id, (), "no responses are stored; "
         "send the earlier items in input"),
        ("conversation", request.conversation, (), "no conversations are stored"),
        ("background", request.background, (False,), "there are no background responses"),
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
    for name, value, fine, why in allowed:
        if is_given(value) and value not in fine:
            wanted = " or ".join(["null", *(shown(each) for each in fine)])
            raise RequestError(f"{name} must be {wanted}: {why}; got {shown_field(value)}")
    for name in request.include or ():
        # Encrypted reasoning is not needed: clients send reasoning back as plain text.
        if name != "reasoning.encrypted_content":
            raise RequestError(f"include must be empty; got {shown(name)}")


def _messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        return [*messages, {"role": "user", "content": request.input}]
    if len(request.input) > MAX_ITEMS:
        raise RequestError(f"input must have at most {MAX_ITEMS} items; got {len(request.input)}")
    for i, given in enumerate(request.input):
        item = typed_item(given, _ITEMS, f"input[{i}]", default="message")
        _add_item(messages, item, f"input[{i}]")
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
        if text:
            messages.append({"role": "assistant", "reasoning_content": text})
    elif item.role == "assistant":
        content = text_of(item.content, _OUTPUT_PARTS, f"{where}.content")
        _assistant(messages, is_text=True)["content"] = content
    else:
        content = text_of(item.content, _INPUT_PARTS, f"{where}.content")
        role = "user" if item.role == "user" else "system"
        if role == "system" and messages and messages[-1]["role"] == "system":
            messages[-1]["content"] += f"\n\n{content}"
        else:
            messages.append({"role": role, "content": content})


def _assistant(messages: list[dict[str, Any]], *, is_text: bool) -> dict[str, Any]:
    """Return the assistant message to add a text or call to; a second text starts a new message."""
    last = messages[-1] if messages else {}
    has_room = not is_text or set(last) == {"role", "reasoning_content"}
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
    raise RequestError(
        'tool_choice must be "auto", "none", "required" or {"type": "function", "name": ...}; '
        f"got {shown(choice)}"
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
