"""`build_app`: the ASGI application, with middlewares and routes on top of an `EngineClient`."""

from __future__ import annotations

import importlib
import pkgutil
import time
from collections.abc import Collection
from types import ModuleType

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from engine.async_engine import EngineClient
from engine.checks import shown
from engine.errors import ConfigError
from engine.server import routes
from engine.server.auth import KeyRing
from engine.server.chat_stream import AUTO, ChatService
from engine.server.connection_pool import ALWAYS_SERVED
from engine.server.gate import AdminOnly, Gate
from engine.server.hosts import AllowedHosts
from engine.server.limits import BodyMemory, RequestSlots
from engine.server.scoring import make_scorer
from engine.server.server_config import ServerConfig
from engine.server.stored_responses import ResponseStore

__all__ = ["begin_drain", "build_app", "num_active_requests"]

_OPTIONAL = {
    "adapters": "admin_key_hashes",
    "weights": "admin_key_hashes",
    "admin": "admin_key_hashes",
    "page": "enable_page",
    "docs": "enable_page",
    "watch": "enable_page",
    "lens": "enable_page",
    "metrics": "enable_metrics",
    "tokenizer_info": "enable_tokenizer_info_endpoint",
}
_EXPOSED_HEADERS = ("X-Request-Id", "Request-Id", "Retry-After")
_PREFLIGHT_SECONDS = 7200  # the longest that Chrome caches one


def build_app(
    client: EngineClient, config: ServerConfig, *, secret: bytes | None = None
) -> Starlette:
    """Build the server's ASGI application.

    Its state holds `client`, `config`, `chat` (a `ChatService`), `scorer` (a `Scorer`),
    `model_names`, `slots`, `body_memory`, `responses` (a `ResponseStore`) and `is_draining`.

    Parameters
    ----------
    client : EngineClient
    config : ServerConfig
    secret : bytes, optional
        See `KeyRing`; by default one of this application's own.

    Raises
    ------
    ConfigError
        If an option does not fit the model, or the key file cannot be used.
    """
    modules = _modules(config)
    keys = KeyRing(config, secret=secret)
    slots = RequestSlots(config)
    public = ALWAYS_SERVED.union(*(getattr(module, "PUBLIC_PATHS", ()) for module in modules))
    endpoints = tuple(e for module in modules for e in getattr(module, "ENDPOINTS", ()))
    admin_paths = frozenset(endpoint.path for endpoint in endpoints if endpoint.is_admin)
    gate = Middleware(
        Gate,
        keys=keys,
        hosts=AllowedHosts(config),
        slots=slots,
        public_paths=public,
        admin_paths=admin_paths,
    )
    app = Starlette(
        routes=_routes(modules, admin_paths),
        middleware=[*_cors(config), gate],
        exception_handlers={HTTPException: _raise_to_gate},
    )
    app.router.redirect_slashes = False
    state = app.state
    state.client = client
    state.config = config
    state.slots = slots
    state.body_memory = BodyMemory(config)
    state.responses = ResponseStore(config)
    state.is_draining = False
    state.created = int(time.time())
    state.endpoints = endpoints
    state.model_names = config.served_model_name or (client.model_info.model,)
    for name in client.adapters:
        if name in state.model_names:
            raise ConfigError(f"lora_modules must not have a name of the model; got {shown(name)}")
    state.scorer = make_scorer(client, config)
    state.chat = ChatService(
        client,
        tool_parser=(config.tool_call_parser or AUTO) if config.enable_auto_tool_choice else None,
        reasoning_parser=config.reasoning_parser or AUTO,
        config=config,
    )
    return app


def begin_drain(app: Starlette) -> None:
    """Reject new requests from now on; running ones continue."""
    app.state.is_draining = True


def num_active_requests(app: Starlette) -> int:
    """Return the number of unfinished requests."""
    slots: RequestSlots = app.state.slots
    return slots.num_active


def _modules(config: ServerConfig) -> list[ModuleType]:
    """Return the modules of `engine.server.routes` that the options enable."""
    names = sorted(module.name for module in pkgutil.iter_modules(routes.__path__))
    return [
        importlib.import_module(f"{routes.__name__}.{name}")
        for name in names
        if name not in _OPTIONAL or getattr(config, _OPTIONAL[name])
    ]


def _routes(modules: list[ModuleType], admin_paths: Collection[str]) -> list[Route]:
    found: list[Route] = [route for module in modules for route in module.routes()]
    for route in found:
        if route.path in admin_paths:
            route.app = AdminOnly(route.app)
    return found


def _cors(config: ServerConfig) -> list[Middleware]:
    if not config.allowed_origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=config.allowed_methods,
            allow_headers=config.allowed_headers,
            allow_credentials=config.allow_credentials,
            expose_headers=_EXPOSED_HEADERS,
            max_age=_PREFLIGHT_SECONDS,
        )
    ]


async def _raise_to_gate(request: Request, error: Exception) -> Response:
    """Re-raise routing errors (unknown path, method not allowed), so that `Gate` handles them."""
    if isinstance(error, HTTPException) and error.status_code in (404, 405):
        detail = f"{error.detail}: {request.method[:16]} {request.url.path[:200]}"
        raise HTTPException(error.status_code, detail, error.headers) from None
    raise error
