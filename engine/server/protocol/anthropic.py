"""/v1/messages: request bodies, and their conversion to /v1/chat/completions requests."""

from __future__ import annotations

import json
from typing import Any, Literal

import msgspec

from engine.checks import shown
from engine.errors import RequestError
from engine.server.protocol.common import UNREAD, is_given, shown_field
from engine.server.protocol.errors import APIError
from engine.server.protocol.items import MAX_ITEMS, text_of, typed_item, typed_items

__all__ = ["CountTokensRequest", "MessagesRequest", "to_chat"]


class CountTokensRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Request body of POST /v1/messages/count_tokens: the fields that form the prompt.

    `cache_control`, here and in content blocks, has no effect: every prefix is cached.
    """

    model: str
    messages: list[Any]
    system: str | list[Any] | None = None
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    cache_control: msgspec.Raw = UNREAD
    context_management: dict[str, Any] | None = None
    thread: msgspec.Raw = UNREAD  # rejected unless null


class MessagesRequest(CountTokensRequest, forbid_unknown_fields=True, kw_only=True):
    """Request body of POST /v1/messages; `metadata` has no effect."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None


# ---- messages and blocks


class _Message(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[Any]


class _Text(msgspec.Struct):
    text: str
    cache_control: Any = None
    citations: list[Any] = []


class _ToolUse(msgspec.Struct):
    id: str
    name: str
    input: dict[str, Any]
    cache_control: Any = None


class _ToolResult(msgspec.Struct):
    tool_use_id: str
    content: str | list[Any] = ""
    is_error: bool = False
    cache_control: Any = None


class _Thinking(msgspec.Struct):
    thinking: str
    signature: str = ""


class _Redacted(msgspec.Struct):
    """Reasoning that only Anthropic can read, in a conversation begun there: left out."""

    data: str = ""


_TEXT: dict[str, type[Any]] = {"text": _Text}
_USER_BLOCKS: dict[str, type[Any]] = {"text": _Text, "tool_result": _ToolResult}
_ASSISTANT_BLOCKS: dict[str, type[Any]] = {
    "text": _Text,
    "tool_use": _ToolUse,
    "thinking": _Thinking,
    "redacted_thinking": _Redacted,
}


class _Tool(msgspec.Struct):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None
    cache_control: Any = None
    eager_input_streaming: bool | None = None


class _Choice(msgspec.Struct):
    name: str | None = None
    disable_parallel_tool_use: bool = False


_CHOICES: dict[str, type[Any]] = dict.fromkeys(("auto", "any", "tool", "none"), _Choice)


class _Thought(msgspec.Struct):
    budget_tokens: int | None = None
    display: str | None = None


_THINKING: dict[str, type[Any]] = dict.fromkeys(("enabled", "disabled", "adaptive"), _Thought)


class _Edits(msgspec.Struct):
    edits: list[Any] = []


class _ClearThinking(msgspec.Struct):
    """Which turns keep their reasoning: the template decides."""

    keep: Any = None


_EDITS: dict[str, type[Any]] = {"clear_thinking_20251015": _ClearThinking}


class _OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    effort: str | None = None
    format: dict[str, Any] | None = None


class _SchemaFormat(msgspec.Struct):
    schema: dict[str, Any]


# ---- conversion


def to_chat(request: CountTokensRequest) -> dict[str, Any]:
    """Convert to an equivalent /v1/chat/completions request body.

    Raises
    ------
    APIError, RequestError
        If a block or a field is invalid or unsupported.
    """
    if is_given(request.thread):
        # With this code, Anthropic's client sends the whole conversation instead.
        details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        got = shown_field(request.thread)
        message = f"thread must be null, conversations are not kept; got {got}"
        raise APIError(400, message, param="thread", anthropic={"details": details})
    if request.context_management is not None:
        fields = {**request.context_management, "type": "edits"}
        edits = typed_item(fields, {"edits": _Edits}, "context_management").edits
        typed_items(edits, _EDITS, "context_management.edits")
    messages = _messages(request)
    body: dict[str, Any] = {
        "model": request.model,
        "messages": messages,
        **_prefill(request, messages),
        **_tools(request),
        **_output(request.output_config),
    }
    if request.thinking is not None:
        typed_item(request.thinking, _THINKING, "thinking")
        if request.thinking["type"] != "adaptive":  # "adaptive": the template decides
            is_enabled = request.thinking["type"] == "enabled"
            body["chat_template_kwargs"] = {"enable_thinking": is_enabled}
    if isinstance(request, MessagesRequest):
        sampling = {
            "max_completion_tokens": request.max_tokens,
            "stop": request.stop_sequences,
            "stream": request.stream,
            "temperature": request.temperature,
            "top_k": request.top_k,
            "top_p": request.top_p,
        }
        body |= {name: value for name, value in sampling.items() if value is not None}
    return body


def _messages(request: CountTokensRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if request.system:
        system = text_of(request.system, _TEXT, "system")
        _append(messages, {"role": "system", "content": system})
    if not 1 <= len(request.messages) <= MAX_ITEMS:
        got = len(request.messages)
        raise RequestError(f"messages must have 1 to {MAX_ITEMS} items; got {got}")
    for i, given in enumerate(request.messages):
        where = f"messages[{i}]"
        fields = {**given, "type": "message"} if isinstance(given, dict) else given
        message = typed_item(fields, {"message": _Message}, where)
        if message.role == "assistant":
            _append(messages, _assistant(message.content, where))
        elif message.role == "system":
            content = text_of(message.content, _TEXT, f"{where}.content")
            _append(messages, {"role": "system", "content": content})
        else:
            for each in _user(message.content, where):
                _append(messages, each)
    return messages


def _append(messages: list[dict[str, Any]], message: dict[str, Any]) -> None:
    """Append a message, or join it to the last one if both are of one role.

    Consecutive turns of one role are one turn in this protocol; many templates refuse two.
    """
    last = messages[-1] if messages else None
    if last is None or last["role"] != message["role"] or message["role"] == "tool":
        messages.append(message)
        return
    for name in ("content", "reasoning_content"):
        if message.get(name):
            last[name] = "\n".join(filter(None, (last.get(name), message[name])))
    if "tool_calls" in message:
        last["tool_calls"] = [*last.get("tool_calls", ()), *message["tool_calls"]]


def _prefill(request: CountTokensRequest, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the fields that let the answer continue a last message of the assistant.

    An empty one is removed. Anthropic's limits apply.
    """
    last = messages[-1]
    if last["role"] != "assistant":
        return {}
    where = f"messages[{len(request.messages) - 1}]"
    if "tool_calls" in last:
        raise RequestError(f"{where} must be followed by a tool_result for each tool_use; got none")
    if "reasoning_content" in last:
        raise RequestError(f"{where} must be text, as the answer continues it; got thinking")
    text = last["content"]
    if text != text.rstrip():
        raise RequestError(
            f"{where}: final assistant content must not end with trailing whitespace; "
            f"got {shown(text[-8:])}"
        )
    if request.thinking is not None and request.thinking.get("type") == "enabled":
        raise RequestError(f"thinking must be disabled if the answer continues {where}")
    if request.output_config is not None and request.output_config.get("format") is not None:
        raise RequestError(f"output_config.format must be left out if the answer continues {where}")
    if not text:
        messages.pop()
        return {}
    return {"continue_final_message": True, "add_generation_prompt": False}


def _user(content: str | list[Any], where: str) -> list[dict[str, Any]]:
    """Convert a user turn to chat messages; each tool result becomes a separate message."""
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    messages: list[dict[str, Any]] = []
    for i, block in enumerate(typed_items(content, _USER_BLOCKS, f"{where}.content")):
        if isinstance(block, _ToolResult):
            text = text_of(block.content, _TEXT, f"{where}.content[{i}].content")
            messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
        else:
            messages.append({"role": "user", "content": block.text})
    if not messages:
        raise RequestError(f"{where}.content must not be empty")
    return messages


def _assistant(content: str | list[Any], where: str) -> dict[str, Any]:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    blocks = typed_items(content, _ASSISTANT_BLOCKS, f"{where}.content")
    message: dict[str, Any] = {
        "role": "assistant",
        "content": "\n".join(block.text for block in blocks if isinstance(block, _Text)),
    }
    thoughts = "\n".join(block.thinking for block in blocks if isinstance(block, _Thinking))
    if thoughts:
        message["reasoning_content"] = thoughts
    calls = [_call(block, where) for block in blocks if isinstance(block, _ToolUse)]
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: _ToolUse, where: str) -> dict[str, Any]:
    try:
        arguments = json.dumps(block.input, ensure_ascii=False)
    except RecursionError:
        raise RequestError(
            f"{where}: the input of {block.id[:80]!r} is nested too deeply"
        ) from None
    return {
        "id": block.id,
        "type": "function",
        "function": {"name": block.name, "arguments": arguments},
    }


def _tools(request: CountTokensRequest) -> dict[str, Any]:
    choice = request.tool_choice
    if not request.tools:
        if choice is not None and choice.get("type") not in ("auto", "none"):
            raise RequestError(f"tool_choice needs tools; got {shown(choice)}")
        return {}
    kinds: dict[str, type[Any]] = {"custom": _Tool}
    body: dict[str, Any] = {
        "tools": [
            _function(typed_item(tool, kinds, f"tools[{i}]", default="custom"))
            for i, tool in enumerate(request.tools)
        ]
    }
    if choice is None:
        return body
    found = typed_item(choice, _CHOICES, "tool_choice")
    kind = choice["type"]
    if (found.name is not None) != (kind == "tool"):
        raise RequestError(f'tool_choice has a name if its type is "tool"; got {shown(choice)}')
    named = {"type": "function", "function": {"name": found.name}}
    body["tool_choice"] = named if kind == "tool" else "required" if kind == "any" else kind
    if found.disable_parallel_tool_use:
        body["parallel_tool_calls"] = False
    return body


def _function(tool: _Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _output(config: dict[str, Any] | None) -> dict[str, Any]:
    if config is None:
        return {}
    fields = {**config, "type": "output_config"}
    found = typed_item(fields, {"output_config": _OutputConfig}, "output_config")
    body: dict[str, Any] = {} if found.effort is None else {"reasoning_effort": found.effort}
    if found.format is not None:
        schema = typed_item(found.format, {"json_schema": _SchemaFormat}, "output_config.format")
        body["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "output", "schema": schema.schema},
        }
    return body
