"""/update_weights_from_disk: new weights while serving, with SGLang's name; for admin keys."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from engine.server.admin_paths import path_inside
from engine.server.json_response import JsonResponse
from engine.server.limits import read_struct
from engine.server.openapi import Endpoint

__all__ = ["ENDPOINTS", "UpdateWeightsRequest", "WeightsUpdated", "routes"]

_UPDATE = "/update_weights_from_disk"


class UpdateWeightsRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Request body: a folder with safetensors in `--weights-root`; tensors may be left out."""

    model_path: str


class WeightsUpdated(msgspec.Struct):
    """Response body of /update_weights_from_disk."""

    success: bool
    message: str
    num_weights: int


ENDPOINTS = (
    Endpoint(
        "post",
        _UPDATE,
        "Write new weights over the model's",
        UpdateWeightsRequest,
        WeightsUpdated,
        is_admin=True,
    ),
)


def routes() -> list[Route]:
    """Return the routes of this module."""
    return [Route(_UPDATE, update_weights, methods=["POST"])]


async def update_weights(request: Request) -> Response:
    """Handle POST /update_weights_from_disk: steps wait while the files are read."""
    body = await read_struct(request, UpdateWeightsRequest)
    state = request.app.state
    root = state.config.weights_root
    path = await asyncio.to_thread(
        path_inside, root, "--weights-root", body.model_path, "model_path"
    )
    names = await state.client.update_weights(path)
    answer = WeightsUpdated(True, "the weights have been updated", len(names))
    return JsonResponse(answer)
