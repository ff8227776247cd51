"""/health: liveness of the engine. /ready: whether the server accepts requests."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from engine.server.json_response import JsonResponse
from engine.server.openapi import Endpoint
from engine.server.protocol.errors import APIError
from engine.server.replicas.client import ReplicaClient

__all__ = ["ENDPOINTS", "routes"]

_STUCK = "a step of the engine has taken longer than step_timeout"

ENDPOINTS = (
    Endpoint("get", "/health", "Whether the engine is alive", needs_key=False),
    Endpoint("get", "/ping", "The same"),
    Endpoint("get", "/ready", "Whether new requests are served"),
)


def routes() -> list[Route]:
    """Return the routes of this module."""
    return [
        Route("/health", health, methods=["GET"]),
        Route("/ping", health, methods=["GET"]),
        Route("/ready", ready, methods=["GET"]),
    ]


async def health(request: Request) -> Response:
    """Reply 200 while the engine is alive, 503 if it hangs or has stopped; needs no API key.

    With several replicas, one live replica suffices; the response lists the state of each.
    """
    client = request.app.state.client
    if client.error is not None:
        raise APIError(503, "the engine has ended")
    if not client.is_responsive:
        raise APIError(503, _STUCK)
    if isinstance(client, ReplicaClient):
        return JsonResponse({"replicas": client.replicas})
    return Response()


async def ready(request: Request) -> Response:
    """Reply 200 while new requests are accepted, otherwise 503 with the reason."""
    state = request.app.state
    if state.is_draining:
        raise APIError(503, "the server is shutting down")
    if state.client.error is not None:
        raise APIError(503, f"the engine has ended: {state.client.error}")
    if not state.client.is_responsive:
        raise APIError(503, _STUCK)
    if state.client.seems_asleep:
        raise APIError(503, "the engine is asleep")
    if isinstance(state.client, ReplicaClient) and not state.client.has_replica:
        raise APIError(503, "no replica is ready; new requests wait until one is")
    return JsonResponse({"status": "ready"})
