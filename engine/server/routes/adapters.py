"""/v1/load_lora_adapter, /v1/unload_lora_adapter: LoRA adapters while serving; for admin keys."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from engine.lora_request import LoRARequest
from engine.server.limits import read_struct
from engine.server.openapi import Endpoint
from engine.server.protocol.errors import APIError

__all__ = ["ADMIN_PATHS", "ENDPOINTS", "LoadAdapterRequest", "UnloadAdapterRequest", "routes"]

_LOAD = "/v1/load_lora_adapter"
_UNLOAD = "/v1/unload_lora_adapter"

ADMIN_PATHS = frozenset({_LOAD, _UNLOAD})


class LoadAdapterRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Request body of /v1/load_lora_adapter.

    `lora_path` must be in the folder `--lora-root`; a relative path is relative to it.
    `load_inplace` replaces an adapter of the same name.
    """

    lora_name: str
    lora_path: str
    load_inplace: bool = False


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
    path = await asyncio.to_thread(_inside, state.config.lora_root, body.lora_path)
    adapter = LoRARequest(body.lora_name, lora_path=path)
    await state.client.add_lora(adapter, load_inplace=body.load_inplace)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def unload_adapter(request: Request) -> PlainTextResponse:
    """Handle POST /v1/unload_lora_adapter: requests that use the adapter end with it."""
    body = await read_struct(request, UnloadAdapterRequest)
    await request.app.state.client.remove_lora(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _inside(root: str | None, path: str) -> str:
    """Return the absolute path of an adapter in the folder `root`.

    Raises
    ------
    APIError
        403, if there is no such folder; 400, if the path leads out of it.
    """
    if root is None:
        raise APIError(403, "adapters can be loaded only by a server with --lora-root; it has none")
    try:
        home = Path(os.path.realpath(root))
        target = Path(os.path.realpath(home / path))
        is_inside = target.is_relative_to(home)
    except (OSError, ValueError):  # a NUL, or too many links
        is_inside = False
    if not is_inside:
        message = f"lora_path must lie in the server's --lora-root; got {path[:200]!r}"
        raise APIError(400, message, param="lora_path")
    return str(target)
