"""/v1/models: names of the model. /version: version of the engine.

Anthropic's clients, which send the header anthropic-version, get lists and entries in their form.
"""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from starlette.requests import Request
from starlette.routing import Route

from engine import __version__
from engine.server.json_response import JsonResponse
from engine.server.limits import check_model
from engine.server.openapi import Endpoint

__all__ = ["ENDPOINTS", "routes"]


ENDPOINTS = (
    Endpoint("get", "/v1/models", "The names of the model, and its LoRA adapters"),
    Endpoint("get", "/v1/models/{model}", "One of them"),
    Endpoint("get", "/version", "The engine's version"),
)


def routes() -> list[Route]:
    """Return the routes of this module."""
    return [
        Route("/v1/models", list_models, methods=["GET"]),
        Route("/v1/models/{model:path}", get_model, methods=["GET"]),
        Route("/version", version, methods=["GET"]),
    ]


async def list_models(request: Request) -> JsonResponse:
    """List all names of the model, and its LoRA adapters."""
    state = request.app.state
    cards = [_card(name, request) for name in (*state.model_names, *state.client.adapters)]
    if _is_anthropic(request):
        ends = {"first_id": cards[0]["id"], "last_id": cards[-1]["id"]}
        return JsonResponse({"data": cards, "has_more": False, **ends})
    return JsonResponse({"object": "list", "data": cards})


async def get_model(request: Request) -> JsonResponse:
    """Return the entry for one name of the model."""
    return JsonResponse(_card(check_model(request.path_params["model"], request), request))


async def version(request: Request) -> JsonResponse:
    """Return the engine's version."""
    return JsonResponse({"version": __version__})


def _card(name: str, request: Request) -> dict[str, Any]:
    state = request.app.state
    if _is_anthropic(request):
        created = datetime.fromtimestamp(state.created, timezone.utc)
        return {
            "type": "model",
            "id": name,
            "display_name": name,
            "created_at": created.isoformat(),
            "max_input_tokens": state.client.model_info.max_model_len,
        }
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "engine",
        "root": state.model_names[0] if name in state.model_names else name,
        "parent": None if name in state.model_names else state.model_names[0],
        "max_model_len": state.client.model_info.max_model_len,
        "default_sampling_params": state.chat.sampling_defaults.values,
    }


def _is_anthropic(request: Request) -> bool:
    return "anthropic-version" in request.headers
