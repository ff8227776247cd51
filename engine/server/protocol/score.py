"""/score and /rerank: request and response bodies."""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.server.protocol.common import Usage
from engine.server.protocol.errors import APIError

__all__ = [
    "RerankDocument",
    "RerankRequest",
    "RerankResponse",
    "RerankResult",
    "ScoreItem",
    "ScoreRequest",
    "ScoreResponse",
    "check_count",
    "pairs_of",
    "text_of_document",
]

Pooling = Literal["last", "mean"]


class ScoreRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Request body of /score; `pooling` is for embeddings, `instruction` for rerankers."""

    text_1: str | list[str]
    text_2: str | list[str]
    model: str | None = None
    pooling: Pooling | None = None
    instruction: str | None = None
    user: str | None = None


class ScoreItem(msgspec.Struct):
    """Score of one pair."""

    index: int
    score: float
    object: Literal["score"] = "score"


class ScoreResponse(msgspec.Struct):
    """Response body of /score."""

    id: str
    created: int
    model: str
    data: list[ScoreItem]
    usage: Usage
    object: Literal["list"] = "list"


class RerankDocument(msgspec.Struct, forbid_unknown_fields=True):
    """Document, as text."""

    text: str


class RerankRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Request body of /rerank; `pooling` is for embeddings, `instruction` for rerankers."""

    query: str
    documents: list[str | RerankDocument]
    model: str | None = None
    top_n: int | None = None
    return_documents: bool | None = None
    pooling: Pooling | None = None
    instruction: str | None = None
    user: str | None = None


class RerankResult(msgspec.Struct):
    """One document's index in the request, and its relevance."""

    index: int
    relevance_score: float
    document: RerankDocument | msgspec.UnsetType = msgspec.UNSET


class RerankResponse(msgspec.Struct):
    """Response body of /rerank: the most relevant documents first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: Usage


def pairs_of(body: ScoreRequest, limit: int) -> list[tuple[str, str]]:
    """Return the pairs of texts of a request: one with each of several, or each with its own.

    Raises
    ------
    APIError
        If there are none or too many, or the numbers of texts do not fit.

    Examples
    --------
    >>> pairs_of(ScoreRequest(text_1="a", text_2=["b", "c"]), 10)
    [('a', 'b'), ('a', 'c')]
    """
    first = [body.text_1] if isinstance(body.text_1, str) else body.text_1
    second = [body.text_2] if isinstance(body.text_2, str) else body.text_2
    check_count("text_1", len(first), limit)
    check_count("text_2", len(second), limit)
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        message = f"text_1 must be one text, or as many as text_2 ({len(second)}); got {len(first)}"
        raise APIError(400, message, param="text_1")
    return list(zip(first, second, strict=True))


def check_count(name: str, count: int, limit: int) -> None:
    """Raise an `APIError` unless a field has 1 to `limit` (max_prompts) texts."""
    if not 1 <= count <= limit:
        message = f"{name} must have 1 to {limit} texts (max_prompts); got {count}"
        raise APIError(400, message, param=name)


def text_of_document(document: str | RerankDocument) -> str:
    """Return the text of a document."""
    return document if isinstance(document, str) else document.text
