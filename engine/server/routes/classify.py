"""/classify, as in vLLM: the scores of a classification head's labels."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from engine.server.json_response import JsonResponse
from engine.server.limits import check_model, read_struct
from engine.server.openapi import Endpoint
from engine.server.protocol.common import Usage
from engine.server.protocol.completion import prompts_of
from engine.server.protocol.errors import APIError, renamed_params
from engine.server.routes.embeddings import INPUT_NAMES, token_ids
from engine.server.sse import unless_disconnected
from engine.tasks.embeddings import CLASSIFY

__all__ = ["ENDPOINTS", "routes"]


class ClassificationRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Request body of /classify."""

    input: str | list[int | str | list[int]]
    model: str | None = None
    user: str | None = None


class ClassificationItem(msgspec.Struct):
    """Scores of one input: a probability of each label, and the most probable one."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassificationResponse(msgspec.Struct):
    """Response body of /classify."""

    id: str
    created: int
    model: str
    data: list[ClassificationItem]
    usage: Usage
    object: Literal["list"] = "list"


ENDPOINTS = (
    Endpoint("post", "/classify", "Classify texts", ClassificationRequest, ClassificationResponse),
)


def routes() -> list[Route]:
    """Return the routes of this module."""
    return [Route("/classify", create_classification, methods=["POST"])]


async def create_classification(request: Request) -> Response:
    """Handle POST /classify."""
    body = await read_struct(request, ClassificationRequest)
    state = request.app.state
    model = check_model(body.model, request, takes_adapters=False)
    labels = state.client.model_info.labels
    if not labels:
        raise APIError(400, "the model has no classification head", param="model")
    prompts = prompts_of(body.input, state.config.max_prompts, "input")
    with renamed_params(INPUT_NAMES):
        ids = await asyncio.to_thread(token_ids, state.client, prompts)
        work = state.client.embed(ids, CLASSIFY)
        rows = await unless_disconnected(request.receive, work)
    data = [
        ClassificationItem(index, labels[int(row.argmax())], row.tolist(), len(labels))
        for index, row in enumerate(rows)
    ]
    count = sum(map(len, ids))
    request_id = f"classify-{secrets.token_hex(16)}"
    found = ClassificationResponse(request_id, int(time.time()), model, data, Usage(count, count))
    return JsonResponse(found)
