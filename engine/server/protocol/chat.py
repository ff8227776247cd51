"""/v1/chat/completions: request and response bodies, messages and tools."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from engine.checks import shown
from engine.sampling_params import SamplingDefaults, SamplingParams
from engine.server.protocol.common import (
    UNREAD,
    Chunks,
    SamplingFields,
    Usage,
    is_given,
    refuse_fields,
    sampling_params,
)
from engine.server.protocol.errors import APIError
from engine.server.protocol.items import media_hint
from engine.server.protocol.logprobs import ChatLogprobs, PromptLogprob
from engine.server.protocol.tools import Choice, FunctionDefinition, Tool
from engine.server.tool_parsers.json_scanner import begins_json_object, complete_values

__all__ = [
    "AnswerMessage",
    "AnswerToolCall",
    "CalledFunction",
    "ChatChoice",
    "ChatChunks",
    "ChatCompletionRequest",
    "ChatCompletionResponse",
    "ChatMessage",
    "ContentPart",
    "ToolCallMessage",
    "chat_params",
    "template_messages",
    "template_tools",
]

MAX_TOOLS = 128
MAX_TOP_LOGPROBS = 20
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,64}")

_encode = msgspec.json.Encoder().encode


class ContentPart(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Content part of a message; only text is supported.

    `cache_control`, here and in messages and tools, has no effect: every prefix is cached.
    """

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: msgspec.Raw = UNREAD
    input_audio: msgspec.Raw = UNREAD
    video_url: msgspec.Raw = UNREAD
    file: msgspec.Raw = UNREAD
    cache_control: msgspec.Raw = UNREAD


class FunctionCall(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Function of an earlier tool call; `arguments` is a JSON object as text."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCallMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Tool call in an earlier assistant message."""

    function: FunctionCall
    id: str | None = None
    type: Literal["function"] | None = None
    index: int | None = None


class ChatMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Message of a conversation.

    Clients may send assistant messages back as they received them; audio, annotations and refusals
    in them are ignored.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCallMessage] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    audio: msgspec.Raw = UNREAD
    annotations: msgspec.Raw = UNREAD
    cache_control: msgspec.Raw = UNREAD
    function_call: msgspec.Raw = UNREAD

    @property
    def text(self) -> str:
        """The content as one text."""
        if isinstance(self.content, list):
            return "\n".join(part.text or "" for part in self.content)
        return self.content or ""


class ChatCompletionRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """Request body of /v1/chat/completions."""

    messages: list[ChatMessage]
    model: str | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    documents: list[dict[str, Any]] | None = None
    # Accepted and ignored.
    metadata: dict[str, msgspec.Raw] | None = None
    service_tier: str | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prediction: msgspec.Raw = UNREAD
    # Rejected unless null.
    functions: msgspec.Raw = UNREAD
    function_call: msgspec.Raw = UNREAD
    audio: msgspec.Raw = UNREAD
    modalities: list[str] | None = None
    web_search_options: msgspec.Raw = UNREAD
    verbosity: str | None = None


class CalledFunction(msgspec.Struct):
    """Function of a tool call in an answer; `arguments` is JSON text."""

    name: str
    arguments: str


class AnswerToolCall(msgspec.Struct):
    """Tool call in an answer."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class AnswerMessage(msgspec.Struct):
    """Assistant message of an answer."""

    content: str | None
    tool_calls: list[AnswerToolCall] | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    role: Literal["assistant"] = "assistant"
    refusal: str | None = None


class ChatChoice(msgspec.Struct):
    """One of the `n` answers; `token_ids` is present if the request has `return_token_ids`."""

    index: int
    message: AnswerMessage
    finish_reason: str | None
    logprobs: ChatLogprobs | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletionResponse(msgspec.Struct):
    """Response body of /v1/chat/completions."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    system_fingerprint: str | None = None
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | None = None
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


# ---- sampling


def chat_params(
    body: ChatCompletionRequest, defaults: SamplingDefaults, **overrides: Any
) -> SamplingParams:
    """Return the sampling parameters of a request; `overrides` that are not None take precedence.

    Raises
    ------
    RequestError, APIError
        If a field is out of range or not supported.
    """
    _check_support(body)
    max_tokens = body.max_completion_tokens
    if max_tokens is None:
        max_tokens = body.max_tokens
    own = dataclasses.replace(defaults, values={"max_tokens": None, **defaults.values})
    logprobs = _num_logprobs(body)
    return sampling_params(body, own, logprobs=logprobs, max_tokens=max_tokens, **overrides)


def _check_support(body: ChatCompletionRequest) -> None:
    refuse_fields(
        body,
        {
            "functions": "use tools",
            "function_call": "use tool_choice",
            "audio": "the model answers with text",
            "web_search_options": "describe a tool",
            "verbosity": "say it in a message",
        },
    )
    if body.modalities is not None and body.modalities != ["text"]:
        message = f'modalities must be ["text"]; got {shown(body.modalities)}'
        raise APIError(400, message, param="modalities")
    if body.store:
        raise APIError(400, "store must be false, answers are not kept; got true", param="store")


def _num_logprobs(body: ChatCompletionRequest) -> int | None:
    top = body.top_logprobs
    if top is None:
        return 0 if body.logprobs else None
    if not 0 <= top <= MAX_TOP_LOGPROBS:
        message = f"top_logprobs must be a whole number in [0, {MAX_TOP_LOGPROBS}]; got {top}"
        raise APIError(400, message, param="top_logprobs")
    if not body.logprobs:
        if top == 0:
            return None
        message = f"top_logprobs needs logprobs to be true; got {top}"
        raise APIError(400, message, param="top_logprobs")
    return top


# ---- template inputs: messages and tools


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Convert messages to the form that chat templates expect.

    Arguments of calls become objects, and the role "developer" becomes "system".

    Raises
    ------
    APIError
        If a part is not text, or arguments are not a JSON object.

    Examples
    --------
    >>> template_messages([ChatMessage(role="user", content="Hi")])
    [{'role': 'user', 'content': 'Hi'}]
    """
    if not messages:
        raise APIError(400, "messages must not be empty", param="messages")
    return [_template_message(m, f"messages[{i}]") for i, m in enumerate(messages)]


def _template_message(message: ChatMessage, where: str) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    found: dict[str, Any] = {"role": role}
    if message.content is None:
        if role not in ("assistant", "tool"):  # a tool may return nothing
            raise APIError(400, f"{where}.content must be a text; got nothing", param="messages")
        found["content"] = None if message.tool_calls else ""
    elif isinstance(message.content, str):
        found["content"] = message.content
    else:
        parts = enumerate(message.content)
        found["content"] = [_template_part(p, f"{where}.content[{i}]") for i, p in parts]
    if is_given(message.function_call):
        why = f"{where}.function_call is not supported, use tool_calls"
        raise APIError(400, why, param="messages")
    if message.name is not None:
        found["name"] = message.name
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    reasoning = message.reasoning_content or message.reasoning
    if reasoning:
        found["reasoning_content"] = reasoning
    if message.tool_calls:
        calls = enumerate(message.tool_calls)
        found["tool_calls"] = [_template_call(c, f"{where}.tool_calls[{i}]") for i, c in calls]
    return found


def _template_part(part: ContentPart, where: str) -> dict[str, Any]:
    if part.type in ("text", "input_text", "output_text") and part.text is not None:
        return {"type": "text", "text": part.text}
    if part.type == "refusal" and part.refusal is not None:
        return {"type": "text", "text": part.refusal}
    message = f'{where} must be {{"type": "text", "text": ...}}; got type {shown(part.type)}'
    raise APIError(400, message + media_hint(part.type), param="messages")


def _template_call(call: ToolCallMessage, where: str) -> dict[str, Any]:
    arguments = call.function.arguments or {}
    if isinstance(arguments, str):
        arguments = _read_arguments(arguments, where)
    function = {"name": call.function.name, "arguments": arguments}
    found: dict[str, Any] = {"type": "function", "function": function}
    if call.id is not None:
        found["id"] = call.id
    return found


def _read_arguments(text: str, where: str) -> dict[str, Any]:
    """Return the arguments of an earlier call; if that was cut, those that are complete."""
    try:  # Clients write no arguments as "null", too.
        return msgspec.json.decode(text, type=dict[str, Any] | None) or {}
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        if begins_json_object(text):
            return complete_values(text)
        message = f"{where}.function.arguments must be a JSON object as text; got {shown(text)}"
        raise APIError(400, message, param="messages") from None


def template_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Convert tools to the form that chat templates expect.

    Raises
    ------
    APIError
        If there are too many tools, or a name is invalid or a duplicate.
    """
    names = [tool.function.name for tool in tools]
    if len(names) > MAX_TOOLS:
        message = f"tools must have at most {MAX_TOOLS} entries; got {len(names)}"
        raise APIError(400, message, param="tools")
    for i, name in enumerate(names):
        if not _TOOL_NAME.fullmatch(name) or name in names[:i]:
            wanted = "of 1 to 64 letters, digits, '_', '-', '.' or ':', each used once"
            message = f"tools[{i}].function.name must be a name {wanted}; got {shown(name)}"
            raise APIError(400, message, param="tools")
    return [{"type": "function", "function": _template_function(t.function)} for t in tools]


def _template_function(function: FunctionDefinition) -> dict[str, Any]:
    return {
        "name": function.name,
        "description": function.description or "",
        "parameters": _parameters(function),
    }


def _parameters(function: FunctionDefinition) -> dict[str, Any]:
    return function.parameters or {"type": "object", "properties": {}}


# ---- streaming


class ChatChunks(Chunks):
    """Encodes the SSE frames of a streamed chat completion.

    Examples
    --------
    >>> chunks = ChatChunks("chatcmpl-0", "m", 5, shows_usage=False)
    >>> print(chunks.content(0, "Hi").decode().strip())
    data: {"id":"chatcmpl-0","object":"chat.completion.chunk","created":5,"model":"m","choices":\
[{"index":0,"delta":{"content":"Hi"},"logprobs":null,"finish_reason":null}]}
    """

    _object = "chat.completion.chunk"
    _prompt = b""  # fields about the prompt that are still to be sent
    _plain_end = b'},"logprobs":null,"finish_reason":null}'

    def content(self, index: int, text: str) -> bytes:
        """Return a frame that contains only content."""
        return self._text(b"content", index, text)

    def reasoning(self, index: int, text: str) -> bytes:
        """Return a frame that contains only reasoning."""
        return self._text(b"reasoning_content", index, text)

    def _text(self, field: bytes, index: int, text: str) -> bytes:
        return b'%b{"index":%d,"delta":{"%b":%b%b' % (
            self._head,
            index,
            field,
            _encode(text),
            self._plain_tail,
        )

    def delta(
        self,
        index: int,
        delta: Mapping[str, Any],
        logprobs: ChatLogprobs | None = None,
        finish_reason: str | None = None,
        stop_reason: int | str | None = None,
        token_ids: Sequence[int] | None = None,
    ) -> bytes:
        """Return a frame for an arbitrary delta."""
        choice: dict[str, Any] = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        if finish_reason is not None:
            choice["stop_reason"] = stop_reason
        if token_ids is not None:
            choice["token_ids"] = token_ids
        return self.choice(choice)

    def show_prompt(self, field: str, value: Any) -> None:
        """Write a field about the prompt into the next frame that is not a plain text."""
        self._prompt += b',"%b":%b' % (field.encode(), _encode(value))

    def choice(self, choice: Any) -> bytes:
        """Return the frame of an arbitrary choice."""
        prompt = self._prompt
        self._prompt = b""
        return self._head + _encode(choice) + self._tail[:1] + prompt + self._tail[1:]
