"""/openapi.json: OpenAPI document of the endpoints."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from engine.server.json_response import JsonResponse
from engine.server.openapi import Endpoint, document

__all__ = ["ENDPOINTS", "routes"]

ENDPOINTS = (Endpoint("get", "/openapi.json", "This description"),)


def routes() -> list[Route]:
    """Return the routes of this module."""
    return [Route("/openapi.json", openapi, methods=["GET"])]


async def openapi(request: Request) -> Response:
    """Return the OpenAPI document of all endpoints."""
    state = request.app.state
    found = document(state.endpoints, has_keys=state.config.needs_key, model=state.model_names[0])
    return JsonResponse(found)
