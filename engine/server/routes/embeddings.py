"""/v1/embeddings: pooled last hidden states."""

from __future__ import annotations

import asyncio
import base64
from typing import Any, Literal

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from engine.errors import map_items
from engine.server.field_limits import check_length, check_num_tokens
from engine.server.json_response import JsonResponse
from engine.server.limits import check_model, read_struct
from engine.server.openapi import Endpoint
from engine.server.protocol.common import Usage
from engine.server.protocol.completion import prompts_of
from engine.server.protocol.errors import APIError, renamed_params
from engine.server.server_config import ServerConfig
from engine.server.sse import unless_disconnected

__all__ = [
    "ENDPOINTS",
    "INPUT_NAMES",
    "EmbeddingObject",
    "EmbeddingRequest",
    "EmbeddingResponse",
    "routes",
    "token_ids",
]


class EmbeddingRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Request body of /v1/embeddings; `pooling` and `normalize` are extensions."""

    input: str | list[int | str | list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None
    pooling: Literal["last", "mean"] | None = None
    normalize: bool | None = None


class EmbeddingObject(msgspec.Struct):
    """Embedding of one input: floats, or base64-encoded float32."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingResponse(msgspec.Struct):
    """Response body of /v1/embeddings."""

    data: list[EmbeddingObject]
    model: str
    usage: Usage
    object: Literal["list"] = "list"


ENDPOINTS = (
    Endpoint("post", "/v1/embeddings", "Embed texts", EmbeddingRequest, EmbeddingResponse),
)


def routes() -> list[Route]:
    """Return the routes of this module."""
    return [Route("/v1/embeddings", create_embeddings, methods=["POST"])]


async def create_embeddings(request: Request) -> Response:
    """Handle POST /v1/embeddings."""
    body = await read_struct(request, EmbeddingRequest)
    state = request.app.state
    model = check_model(body.model, request, takes_adapters=False)
    work = embed(state.client, body, model, state.config)
    answer = await unless_disconnected(request.receive, work)
    data = await asyncio.to_thread(msgspec.json.encode, answer)
    return JsonResponse(data)


async def embed(
    client: Any, body: EmbeddingRequest, model: str, config: ServerConfig
) -> EmbeddingResponse:
    """Compute the response to a request.

    Raises
    ------
    APIError, RequestError
        If `dimensions` is not the model's, or an input cannot be served.
    """
    prompts = prompts_of(body.input, config.max_prompts, "input")
    size = client.model_info.hidden_size
    _check_size(len(prompts), size, config)
    if body.dimensions is not None and body.dimensions != size:
        message = f"dimensions must be {size}, the model's; got {body.dimensions}"
        raise APIError(400, message, param="dimensions")
    normalize = body.normalize is not False
    with renamed_params(INPUT_NAMES):
        inputs = await asyncio.to_thread(token_ids, client, prompts)
        found = await client.embed(inputs, body.pooling, normalize=normalize)
    data = await asyncio.to_thread(_objects, found, body.encoding_format)
    num_tokens = sum(map(len, inputs))
    return EmbeddingResponse(data, model, Usage(num_tokens, num_tokens))


def _check_size(num_inputs: int, size: int, config: ServerConfig) -> None:
    most = config.max_embedding_values
    if num_inputs * size > most:
        raise APIError(
            400,
            f"input must have at most {most // size} entries, as embeddings of {size} dimensions "
            f"must have at most {most} values in all (max_embedding_values); got {num_inputs}",
            param="input",
        )


INPUT_NAMES = {"prompt": "input", "prompts": "input", "token_ids": "input"}
"""The request's name of what errors of the engine name otherwise."""


def token_ids(client: Any, prompts: list[Any]) -> list[list[int]]:
    """Tokenize texts; token ids are returned unchanged."""
    if isinstance(prompts[0], str) and client.tokenizer is None:
        raise APIError(400, "input must be token ids, as the model has no tokenizer; got text")

    def checked(prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            check_length(prompt, "input", client)
            ids: list[int] = client.tokenizer.encode(prompt)
        else:
            ids = prompt
        check_num_tokens(len(ids), "input", client, num_reserved=0)
        return ids

    return map_items("input", prompts, checked)


def _objects(vectors: list[Any], encoding: str | None) -> list[EmbeddingObject]:
    return [
        EmbeddingObject(index, _encoded(np.asarray(vector, "<f4"), encoding))
        for index, vector in enumerate(vectors)
    ]


def _encoded(vector: Any, encoding: str | None) -> Any:
    """Return a vector as text, or as JSON: one at a time, so that other threads run in between."""
    if encoding == "base64":
        return base64.b64encode(vector.tobytes()).decode("ascii")
    return msgspec.Raw(msgspec.json.encode(vector.tolist()))
