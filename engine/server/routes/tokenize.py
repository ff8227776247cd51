"""/tokenize and /detokenize, with vLLM's fields."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from engine.async_engine import EngineClient
from engine.server.field_limits import (
    check_length,
    check_num_tokens,
    check_text_of,
    text_of_ids,
)
from engine.server.json_response import JsonResponse
from engine.server.limits import check_model, read_struct
from engine.server.openapi import Endpoint
from engine.server.protocol.chat import ChatCompletionRequest, ChatMessage
from engine.server.protocol.errors import APIError
from engine.server.protocol.tools import Tool
from engine.server.server_config import ServerConfig

__all__ = [
    "ENDPOINTS",
    "DetokenizeRequest",
    "DetokenizeResponse",
    "TokenizeRequest",
    "TokenizeResponse",
    "routes",
]


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Request body of /tokenize: a prompt or a conversation."""

    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    model: str | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class TokenizeResponse(msgspec.Struct):
    """Response body of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Request body of /detokenize."""

    tokens: list[int]
    model: str | None = None
    skip_special_tokens: bool | None = None


class DetokenizeResponse(msgspec.Struct):
    """Response body of /detokenize."""

    prompt: str


_OF_CONVERSATIONS = (
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
)

ENDPOINTS = (
    Endpoint("post", "/tokenize", "Tokenize a prompt", TokenizeRequest, TokenizeResponse),
    Endpoint("post", "/detokenize", "The text of tokens", DetokenizeRequest, DetokenizeResponse),
)


def routes() -> list[Route]:
    """Return the routes of this module."""
    return [
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
    ]


async def tokenize(request: Request) -> Response:
    """Handle POST /tokenize: return token ids and their number."""
    body = await read_struct(request, TokenizeRequest)
    check_model(body.model, request)
    state = request.app.state
    tokenizer = _tokenizer(request)
    if (body.prompt is None) == (body.messages is None):
        raise APIError(400, "exactly one of prompt and messages must be given", param="prompt")
    if body.prompt is not None:
        for name in _OF_CONVERSATIONS:
            if getattr(body, name):
                raise APIError(400, f"{name} needs messages; prompt was given", param=name)
        check_length(body.prompt, "prompt", state.client)
        with_special = body.add_special_tokens is not False
        ids = await asyncio.to_thread(tokenizer.encode, body.prompt, with_special)
    else:
        chat = ChatCompletionRequest(
            messages=body.messages or [],
            tools=body.tools,
            add_special_tokens=body.add_special_tokens,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=bool(body.continue_final_message),
            chat_template_kwargs=body.chat_template_kwargs,
        )
        ids = (await asyncio.to_thread(state.chat.render, chat))["prompt_token_ids"]
    texts = None
    if body.return_token_strs:
        field = "prompt" if body.messages is None else "messages"
        check_num_tokens(len(ids), field, state.client, num_reserved=0)
        texts = await asyncio.to_thread(lambda: [tokenizer.id_to_token(i) or "" for i in ids])
    answer = TokenizeResponse(len(ids), state.client.model_info.max_model_len, ids, texts)
    data = await asyncio.to_thread(msgspec.json.encode, answer)
    return JsonResponse(data)


async def detokenize(request: Request) -> Response:
    """Handle POST /detokenize: return the text of token ids."""
    body = await read_struct(request, DetokenizeRequest)
    check_model(body.model, request)
    _tokenizer(request)
    state = request.app.state
    text = await asyncio.to_thread(_text, state.client, body, state.config)
    return JsonResponse(DetokenizeResponse(text))


def _text(client: EngineClient, body: DetokenizeRequest, config: ServerConfig) -> str:
    check_text_of([body.tokens], "tokens", client.tokenizer, config)
    skip = bool(body.skip_special_tokens)
    return text_of_ids(body.tokens, "tokens", client, skip_special_tokens=skip)


def _tokenizer(request: Request) -> Any:
    tokenizer = request.app.state.client.tokenizer
    if tokenizer is None:
        raise APIError(400, "the model has no tokenizer")
    return tokenizer
