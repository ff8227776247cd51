"""`/v1/engine/lens`: what each layer would have said in the place of a token (logit lens)."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from engine.async_engine import EngineClient
from engine.checks import token_ids_of
from engine.server.field_limits import check_length, check_num_tokens
from engine.server.json_response import JsonResponse
from engine.server.limits import check_model, read_struct
from engine.server.openapi import Endpoint
from engine.server.prompt_log import log_prompt
from engine.server.protocol.chat import ChatCompletionRequest, ChatMessage
from engine.server.protocol.errors import APIError, renamed_params
from engine.server.protocol.tools import Tool
from engine.server.sse import unless_disconnected
from engine.tasks.logit_lens import MAX_LENS_TOKENS, MAX_TOKENS, MAX_TOP, LogitLens
from engine.text.detokenizer import known_bytes

__all__ = ["ENDPOINTS", "LensLimits", "LensRequest", "LensResponse", "routes"]

_PATH = "/v1/engine/lens"


class LensRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Request body: a prompt or a conversation, the tokens after it, and how many to look at."""

    prompt: str | list[int] | None = None
    messages: list[ChatMessage] | None = None
    token_ids: list[int] | None = None
    num_tokens: int | None = None
    top: int | None = None
    model: str | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class LensPrediction(msgspec.Struct):
    """One of a layer's likeliest tokens."""

    token_id: int
    token: str
    probability: float


class LensLayer(msgspec.Struct):
    """What one layer predicts: rank and probability of the token, and the likeliest tokens."""

    rank: int
    probability: float
    top: list[LensPrediction]


class LensToken(msgspec.Struct):
    """A token, and what each layer predicts in its place, first layer first."""

    token_id: int
    token: str
    layers: list[LensLayer]


class LensResponse(msgspec.Struct):
    """Response body of POST."""

    model: str
    num_tokens: int
    tokens: list[LensToken]


class LensLimits(msgspec.Struct):
    """Response body of GET; `num_layers` is 0 if the lens does not support the model."""

    num_layers: int
    max_tokens: int
    max_lens_tokens: int
    max_top: int


ENDPOINTS = (
    Endpoint("get", _PATH, "The limits of the logit lens", None, LensLimits),
    Endpoint("post", _PATH, "What each layer would have said", LensRequest, LensResponse),
)


def routes() -> list[Route]:
    """Return the routes of this module."""
    return [
        Route(_PATH, get_limits, methods=["GET"]),
        Route(_PATH, create_lens, methods=["POST"]),
    ]


async def get_limits(request: Request) -> Response:
    """Handle GET: tell whether the lens supports the model, and its limits."""
    info = request.app.state.client.model_info
    most = min(MAX_TOKENS, info.max_model_len)
    return JsonResponse(LensLimits(info.num_lens_layers, most, MAX_LENS_TOKENS, MAX_TOP))


async def create_lens(request: Request) -> Response:
    """Handle POST: compute one lens at a time, between the steps of other requests."""
    body = await read_struct(request, LensRequest)
    state = request.app.state
    model = check_model(body.model, request, takes_adapters=False)
    if not state.client.model_info.num_lens_layers:
        raise APIError(
            501,
            "the logit lens supports neither pipeline stages nor layers with several residual "
            "streams, which this model has",
        )
    ids, field = await asyncio.to_thread(_token_ids, state, body)
    if state.config.log_prompts:
        log_prompt(f"lens-{secrets.token_hex(16)}", str(ids))
    if not hasattr(state, "lens_lock"):
        state.lens_lock = asyncio.Lock()

    async def compute() -> LogitLens:
        async with state.lens_lock:
            found: LogitLens = await state.client.logit_lens(
                ids,
                1 if body.num_tokens is None else body.num_tokens,
                5 if body.top is None else body.top,
            )
            return found

    with renamed_params({"token_ids": field}):
        lens = await unless_disconnected(request.receive, compute())
    tokens = await asyncio.to_thread(_tokens, lens, state.client.tokenizer)
    return JsonResponse(LensResponse(model, len(ids), tokens))


def _token_ids(state: Any, body: LensRequest) -> tuple[list[int], str]:
    """Return the whole sequence, prompt and tokens after it, and the field that ends it."""
    client: EngineClient = state.client
    vocab_size = client.model_info.vocab_size
    wanted = f"a token id in [0, {vocab_size})"
    if (body.prompt is None) == (body.messages is None):
        raise APIError(400, "exactly one of prompt and messages must be given", param="prompt")
    if body.messages is not None:
        chat = ChatCompletionRequest(
            messages=body.messages,
            tools=body.tools,
            chat_template_kwargs=body.chat_template_kwargs,
        )
        ids = state.chat.render(chat)["prompt_token_ids"]
    elif isinstance(body.prompt, str):
        if client.tokenizer is None:
            raise APIError(400, "prompt must be token ids, as the model has no tokenizer; got text")
        check_length(body.prompt, "prompt", client)
        ids = client.tokenizer.encode(body.prompt)
    else:
        ids = token_ids_of("prompt", body.prompt or [], vocab_size, wanted)
    field = "prompt" if body.messages is None else "messages"
    if body.token_ids:
        field = "token_ids"
        ids = [*ids, *token_ids_of(field, body.token_ids, vocab_size, wanted)]
    check_num_tokens(len(ids), field, client, num_reserved=0)
    return ids, field


def _tokens(lens: LogitLens, tokenizer: Any) -> list[LensToken]:
    def text(token_id: int) -> str:
        if tokenizer is None:
            return ""
        return (known_bytes(tokenizer, token_id) or b"").decode("utf-8", "replace")

    def layer(index: int, at: int) -> LensLayer:
        ids = lens.top_ids[index, at].tolist()
        shares = lens.top_probabilities[index, at].tolist()
        top = [LensPrediction(i, text(i), p) for i, p in zip(ids, shares, strict=True)]
        return LensLayer(int(lens.ranks[index, at]), float(lens.probabilities[index, at]), top)

    return [
        LensToken(token_id, text(token_id), [layer(i, at) for i in range(len(lens.ranks))])
        for at, token_id in enumerate(lens.token_ids.tolist())
    ]
