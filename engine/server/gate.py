"""`Gate`: outermost middleware: request id, API key, shutdown, request slots, errors, log."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Collection
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.core.token_meter import METER, TokenMeter
from engine.server.access_log import log_request, request_id_of
from engine.server.auth import KeyRing
from engine.server.connection_pool import ALWAYS_SERVED
from engine.server.hosts import AllowedHosts
from engine.server.limits import RequestSlots
from engine.server.protocol.errors import (
    APIError,
    api_error,
    error_body,
    error_status,
    is_anthropic,
)
from engine.server.sse import ClientGone

__all__ = ["AdminOnly", "Gate"]

_KEY_CHARS = 8  # characters of a key's hash that are logged
_CLIENT_GONE = 499  # nginx's status for a disconnected client; only in the log
_log = logging.getLogger("engine.server")


class Gate:
    """ASGI middleware that admits requests and converts exceptions to error responses.

    Parameters
    ----------
    app : ASGI application
    keys : KeyRing
    hosts : AllowedHosts
        Hosts under which the server may be addressed; `ALWAYS_SERVED` paths under any, since the
        probes of a cluster use the address of a container.
    slots : RequestSlots
    public_paths : collection of str
        Paths served without an API key.
    admin_paths : collection of str
        Paths served with an admin key only; their routes need `AdminOnly` too.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: KeyRing,
        hosts: AllowedHosts,
        slots: RequestSlots,
        public_paths: Collection[str],
        admin_paths: Collection[str] = (),
    ) -> None:
        self._app = app
        self._keys = keys
        self._hosts = hosts
        self._slots = slots
        self._public = frozenset(public_paths)
        self._admin = frozenset(admin_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        visit = _Visit(scope, send, request_id_of(headers))
        scope.setdefault("state", {})["request_id"] = visit.request_id
        token = METER.set(visit.meter)
        try:
            await self._enter(scope, receive, visit, headers)
        except ClientGone:
            visit.status = _CLIENT_GONE
        except Exception as error:
            await self._refuse(visit, error)
        finally:
            METER.reset(token)
            visit.log()

    async def _enter(self, scope: Scope, receive: Receive, visit: _Visit, headers: Headers) -> None:
        path = _path(scope)
        if path not in ALWAYS_SERVED:
            self._hosts.check(headers)
        is_admin = scope["state"]["is_admin"] = path in self._admin
        if is_admin:
            visit.key = self._keys.check_admin(headers)
        elif path not in self._public:
            visit.key = self._keys.check(headers)
        scope["state"]["key"] = visit.key
        scope["state"]["key_salt"] = self._keys.cache_salt(visit.key)
        if scope["method"] != "POST":
            await self._app(scope, receive, visit.send)
            return
        state = scope["app"].state
        if state.is_draining:
            message = "the server is shutting down"
            raise APIError(503, message, headers={"Retry-After": "10", "Connection": "close"})
        if state.client.error is not None:
            raise APIError(503, f"the engine has ended: {state.client.error}")
        with contextlib.ExitStack() as slot:
            if not (is_admin or path.endswith("/cancel")):  # these end what fills the slots
                slot.enter_context(self._slots.hold(visit.key))
            scope["state"]["slot"] = slot  # a background response takes it over
            await self._app(scope, receive, visit.send)

    async def _refuse(self, visit: _Visit, error: Exception) -> None:
        """Send an error response; log unexpected exceptions with their traceback."""
        if isinstance(error, HTTPException):
            found = APIError(error.status_code, error.detail, headers=error.headers)
        else:
            found = api_error(error)
        if found.status == 500 and not isinstance(error, APIError):
            _log.error("request %s failed", visit.request_id, exc_info=error)
        if visit.is_complete:  # a stream that ended with an error frame
            return
        if visit.status:
            raise error  # the response has started: the connection is closed
        path = _path(visit.scope)
        body = error_body(found, path, visit.request_id)
        raw = MutableHeaders(found.headers)
        raw["content-type"] = "application/json"
        raw["content-length"] = str(len(body))
        status = error_status(found, path)
        start = {"type": "http.response.start", "status": status, "headers": raw.raw}
        await visit.send(start)
        await visit.send({"type": "http.response.body", "body": body})


class AdminOnly:
    """ASGI middleware of an admin's route: serves only requests that `Gate` let in as an admin's.

    Routes match more than their path: also one with a newline at its end, whose key the gate has
    not checked for them. Here such a request ends, whatever the routes match.

    Parameters
    ----------
    app : ASGI application
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if not scope["state"]["is_admin"]:
            raise HTTPException(404)
        await self._app(scope, receive, send)


def _path(scope: Scope) -> str:
    """Return the path without `root_path`, the prefix under which a proxy exposes the server."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


class _Visit:
    """Request in progress, as the access log records it."""

    def __init__(self, scope: Scope, send: Send, request_id: str) -> None:
        self.scope = scope
        self.request_id = request_id
        self.key: str | None = None
        self.status = 0
        self.is_complete = False
        self.meter = TokenMeter()
        self._send = send
        self._num_bytes = 0
        self._begin = time.monotonic()

    async def send(self, message: Message) -> None:
        """Forward an ASGI message; add the request id to the first one."""
        if message["type"] == "http.response.body":
            self._num_bytes += len(message.get("body", b""))
        elif message["type"] == "http.response.start":
            self.status = message["status"]
            names = [b"x-request-id"]
            if is_anthropic(_path(self.scope)):
                names.append(b"request-id")
            own: Any = [(name, self.request_id.encode("ascii")) for name in names]
            message["headers"] = [*message.get("headers", ()), *own]
        await self._send(message)
        self.is_complete = message["type"] == "http.response.body" and not message.get("more_body")

    def log(self) -> None:
        """Write this request's access log line."""
        scope = self.scope
        seconds = time.monotonic() - self._begin
        first = self.meter.first_token_time
        log_request(
            self.request_id,
            scope["method"],
            scope["path"],
            self.status or 500,
            seconds,
            self._num_bytes,
            self.key and self.key[:_KEY_CHARS],
            self.meter,
            None if first is None else first - self._begin,
        )
