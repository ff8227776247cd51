"""/v1/load_lora_adapter, /v1/unload_lora_adapter: LoRA adapters while serving; for admin keys."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from engine.lora_request import LoRARequest
from engine.server.admin_paths import path_inside
from engine.server.limits import read_struct
from engine.server.openapi import Endpoint
from engine.server.protocol.errors import APIError

__all__ = ["ENDPOINTS", "LoadAdapterRequest", "UnloadAdapterRequest", "routes"]

_LOAD = "/v1/load_lora_adapter"
_UNLOAD = "/v1/unload_lora_adapter"


class LoadAdapterRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Request body of /v1/load_lora_adapter.

    `lora_path` must be in the folder `--lora-root`; a relative path is relative to it.
    `load_inplace` replaces an adapter of the same name.
    """

    lora_name: str
    lora_path: str
    load_inplace: bool | None = None


class UnloadAdapterRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Request body of /v1/unload_lora_adapter; the number is ignored."""

    lora_name: str
    lora_int_id: int | None = None


ENDPOINTS = (
    Endpoint(
        "post",
        _LOAD,
        "Load a LoRA adapter",
        LoadAdapterRequest,
        media_type="text/plain",
        is_admin=True,
    ),
    Endpoint(
        "post",
        _UNLOAD,
        "Unload a LoRA adapter",
        UnloadAdapterRequest,
        media_type="text/plain",
        is_admin=True,
    ),
)


def routes() -> list[Route]:
    """Return the routes of this module."""
    return [
        Route(_LOAD, load_adapter, methods=["POST"]),
        Route(_UNLOAD, unload_adapter, methods=["POST"]),
    ]


async def load_adapter(request: Request) -> PlainTextResponse:
    """Handle POST /v1/load_lora_adapter: the adapter's name becomes one of the models'."""
    body = await read_struct(request, LoadAdapterRequest)
    state = request.app.state
    if body.lora_name in state.model_names:
        message = f"lora_name must not be a name of the model; got {body.lora_name[:100]!r}"
        raise APIError(400, message, param="lora_name")
    root = state.config.lora_root
    path = await asyncio.to_thread(path_inside, root, "--lora-root", body.lora_path, "lora_path")
    adapter = LoRARequest(body.lora_name, lora_path=path)
    await state.client.add_lora(adapter, load_inplace=bool(body.load_inplace))
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def unload_adapter(request: Request) -> PlainTextResponse:
    """Handle POST /v1/unload_lora_adapter: requests that use the adapter end with it."""
    body = await read_struct(request, UnloadAdapterRequest)
    await request.app.state.client.remove_lora(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
