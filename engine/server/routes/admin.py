"""Endpoints that change the engine; only with `--admin-api-key`, and only for such a key."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from engine.errors import ConfigError
from engine.server.json_response import JsonResponse
from engine.server.limits import check_query
from engine.server.openapi import Endpoint
from engine.server.protocol.errors import APIError

__all__ = ["ENDPOINTS", "routes"]

_RESET = "/reset_prefix_cache"
_SLEEP = "/sleep"
_WAKE = "/wake_up"
_STATE = "/is_sleeping"


class PrefixCacheReset(msgspec.Struct):
    """Response body of /reset_prefix_cache: blocks freed, on device and host, in all replicas."""

    num_freed_blocks: int


class SleepState(msgspec.Struct):
    """Response body of /sleep, /wake_up and /is_sleeping."""

    is_sleeping: bool


ENDPOINTS = (
    Endpoint("post", _RESET, "Drop cached prefixes", response=PrefixCacheReset, is_admin=True),
    Endpoint(
        "post",
        _SLEEP,
        "Free the memory of weights and KV cache",
        response=SleepState,
        query=("level",),
        is_admin=True,
    ),
    Endpoint("post", _WAKE, "Allocate it again", response=SleepState, is_admin=True),
    Endpoint("get", _STATE, "Whether the engine sleeps", response=SleepState, is_admin=True),
)


def routes() -> list[Route]:
    """Return the routes of this module."""
    return [
        Route(_RESET, reset_prefix_cache, methods=["POST"]),
        Route(_SLEEP, sleep, methods=["POST"]),
        Route(_WAKE, wake_up, methods=["POST"]),
        Route(_STATE, is_sleeping, methods=["GET"]),
    ]


async def reset_prefix_cache(request: Request) -> Response:
    """Handle POST /reset_prefix_cache, which takes neither a body nor parameters."""
    check_query(request)
    return JsonResponse(PrefixCacheReset(await request.app.state.client.reset_prefix_cache()))


async def sleep(request: Request) -> Response:
    """Handle POST /sleep?level=1; the engine must have no unfinished requests."""
    check_query(request, "level")
    given = request.query_params.get("level", "1")
    if given not in ("1", "2"):
        raise APIError(400, f"level must be 1 or 2; got {given[:50]!r}", param="level")
    try:
        await request.app.state.client.sleep(int(given))
    except ConfigError as error:  # an engine of this kind cannot sleep
        raise APIError(400, str(error)) from None
    return JsonResponse(SleepState(True))


async def wake_up(request: Request) -> Response:
    """Handle POST /wake_up."""
    check_query(request)
    await request.app.state.client.wake_up()
    return JsonResponse(SleepState(False))


async def is_sleeping(request: Request) -> Response:
    """Handle GET /is_sleeping."""
    check_query(request)
    return JsonResponse(SleepState(await request.app.state.client.is_sleeping()))
