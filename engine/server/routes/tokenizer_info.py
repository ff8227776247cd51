"""/tokenizer_info: the tokenizer's special tokens and chat template, as vLLM's endpoint.

Only with `--enable-tokenizer-info-endpoint`. Evaluation harnesses use it to tokenize remotely. The
response is made of the fields below, so it contains no paths.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.routing import Route

from engine.server.json_response import JsonResponse
from engine.server.openapi import Endpoint
from engine.server.protocol.errors import APIError

__all__ = ["ENDPOINTS", "routes"]

_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")

ENDPOINTS = (Endpoint("get", "/tokenizer_info", "Special tokens and chat template"),)


def routes() -> list[Route]:
    """Return the routes of this module."""
    return [Route("/tokenizer_info", tokenizer_info, methods=["GET"])]


async def tokenizer_info(request: Request) -> JsonResponse:
    """Handle GET /tokenizer_info; a special token that the model lacks is null."""
    client = request.app.state.client
    tokenizer = client.tokenizer
    if tokenizer is None:
        raise APIError(400, "the model has no tokenizer")
    found: dict[str, Any] = {name: tokenizer.special_tokens.get(name) for name in _TOKENS}
    if found["eos_token"] is None and tokenizer.eos_token_id is not None:
        found["eos_token"] = tokenizer.id_to_token(tokenizer.eos_token_id)
    found |= {
        "tokenizer_class": type(tokenizer).__name__,
        "vocab_size": tokenizer.vocab_size,
        "model_max_length": client.model_info.max_model_len,
        "chat_template": tokenizer.chat_template,
    }
    return JsonResponse(found)
