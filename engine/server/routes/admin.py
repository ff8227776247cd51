"""Endpoints that change the engine; only with `--admin-api-key`, and only for such a key."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from engine.server.openapi import Endpoint
from engine.server.protocol.errors import APIError

__all__ = ["ADMIN_PATHS", "ENDPOINTS", "routes"]

_RESET = "/reset_prefix_cache"

ADMIN_PATHS = frozenset({_RESET})


class PrefixCacheReset(msgspec.Struct):
    """Response body of /reset_prefix_cache: blocks freed, on device and host, in all replicas."""

    num_freed_blocks: int


ENDPOINTS = (
    Endpoint("post", _RESET, "Drop cached prefixes", response=PrefixCacheReset, is_admin=True),
)


def routes() -> list[Route]:
    """Return the routes of this module."""
    return [Route(_RESET, reset_prefix_cache, methods=["POST"])]


async def reset_prefix_cache(request: Request) -> Response:
    """Handle POST /reset_prefix_cache, which takes neither a body nor parameters."""
    if request.url.query:
        message = f"the query must be empty; got {request.url.query[:100]!r}"
        raise APIError(400, message)
    count = await request.app.state.client.reset_prefix_cache()
    body = msgspec.json.encode(PrefixCacheReset(count))
    return Response(body, media_type="application/json")
