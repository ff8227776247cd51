"""/score and /rerank, as in vLLM, Jina and Cohere: how relevant texts are to each other."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from engine.server.json_response import JsonResponse
from engine.server.limits import check_model, read_struct
from engine.server.openapi import Endpoint
from engine.server.prompt_log import log_prompt
from engine.server.protocol.common import Usage
from engine.server.protocol.errors import APIError
from engine.server.protocol.score import (
    RerankDocument,
    RerankRequest,
    RerankResponse,
    RerankResult,
    ScoreItem,
    ScoreRequest,
    ScoreResponse,
    check_count,
    pairs_of,
    text_of_document,
)
from engine.server.scoring import Pair
from engine.server.sse import unless_disconnected

__all__ = ["ENDPOINTS", "routes"]

_SCORE = ("/score", "/v1/score")
_RERANK = ("/rerank", "/v1/rerank", "/v2/rerank")

ENDPOINTS = (
    *(Endpoint("post", path, "Score pairs of texts", ScoreRequest, ScoreResponse)
      for path in _SCORE),
    *(Endpoint("post", path, "Sort documents by relevance", RerankRequest, RerankResponse)
      for path in _RERANK),
)  # fmt: skip


def routes() -> list[Route]:
    """Return the routes of this module."""
    return [
        *(Route(path, create_scores, methods=["POST"]) for path in _SCORE),
        *(Route(path, create_ranking, methods=["POST"]) for path in _RERANK),
    ]


async def create_scores(request: Request) -> Response:
    """Handle POST /score."""
    body = await read_struct(request, ScoreRequest)
    model = check_model(body.model, request, takes_adapters=False)
    pairs = pairs_of(body, request.app.state.config.max_prompts)
    request_id = f"score-{secrets.token_hex(16)}"
    found, count = await _scores(request, body, pairs, ("text_1", "text_2"), request_id)
    data = [ScoreItem(index, score) for index, score in enumerate(found)]
    usage = Usage(count, count)
    return JsonResponse(ScoreResponse(request_id, int(time.time()), model, data, usage))


async def create_ranking(request: Request) -> Response:
    """Handle POST /rerank."""
    body = await read_struct(request, RerankRequest)
    model = check_model(body.model, request, takes_adapters=False)
    check_count("documents", len(body.documents), request.app.state.config.max_prompts)
    if body.top_n is not None and body.top_n < 0:
        message = f"top_n must be at least 1, or 0 for all documents; got {body.top_n}"
        raise APIError(400, message, param="top_n")
    texts = [text_of_document(document) for document in body.documents]
    request_id = f"rerank-{secrets.token_hex(16)}"
    pairs = [(body.query, text) for text in texts]
    found, count = await _scores(request, body, pairs, ("query", "documents"), request_id)
    order = sorted(range(len(texts)), key=lambda index: -found[index])
    results = [RerankResult(index, found[index]) for index in order[: body.top_n or None]]
    if body.return_documents is not False:
        for each in results:
            each.document = RerankDocument(texts[each.index])
    return JsonResponse(RerankResponse(request_id, model, results, Usage(count, count)))


async def _scores(
    request: Request,
    body: ScoreRequest | RerankRequest,
    pairs: Sequence[Pair],
    fields: Pair,
    request_id: str,
) -> tuple[list[float], int]:
    state = request.app.state
    if state.config.log_prompts:
        for pair in pairs:
            log_prompt(request_id, "\n".join(pair))
    work = state.scorer.scores(
        pairs,
        fields=fields,
        pooling=body.pooling,
        instruction=body.instruction,
        cache_salt=request.state.key_salt,
    )
    found: tuple[list[float], int] = await unless_disconnected(request.receive, work)
    return found
