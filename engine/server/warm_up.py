"""Requests that an API process makes to itself before it is ready.

The first request of a process takes several times as long as the tenth: modules, caches and
Python's specialized code are not there yet. These requests go through the application and the
client, and are answered in the place of the engine, which does not hear of them.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.applications import Starlette

from engine.errors import EngineError
from engine.server import messages as m
from engine.server.app import build_app
from engine.server.protocol.errors import APIError
from engine.server.request_client import RequestClient
from engine.server.server_config import ServerConfig

__all__ = ["warm_up"]

_NUM_ROUNDS = 10  # Python specializes a function at its eighth call
_NUM_TOKENS = 3  # the first, one like all others, and the last
_COMMON = {"stream": True, "max_tokens": _NUM_TOKENS, "temperature": 0.0}
_BODIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", {"prompt": [0, 0], **_COMMON}),
    ("/v1/completions", {"prompt": "Hello", **_COMMON}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}], **_COMMON}),
)


async def warm_up(client: RequestClient) -> list[bytes]:
    """Stream answers of an application of its own, which neither logs nor asks for keys.

    Returns
    -------
    list of bytes
        The last answer of each kind; b"" of those that the model does not have (no tokenizer, no
        template).
    """
    app = build_app(client, ServerConfig())
    found = [b""] * len(_BODIES)
    is_refused = [False] * len(_BODIES)  # once is enough: a template may take until its limit
    with client.answered_by(_answer):
        for _ in range(_NUM_ROUNDS):
            for index, (path, body) in enumerate(_BODIES):
                if is_refused[index]:
                    continue
                try:
                    found[index] = await _post(app, path, json.dumps(body).encode())
                except (APIError, EngineError):
                    is_refused[index] = True
    return found


def _answer(message: m.FromClient) -> list[m.FromEngine]:
    """Return what an engine would send."""
    if not isinstance(message, m.Add):
        return []
    pieces = [
        m.Piece(message.handle, [m.Continuation(0, [0], None, reason, None)], *rest, None)
        for reason, rest in ((None, (False, 0, 0.0, 0.0)), ("length", (True, 0, 0.0, 0.0)))
    ]
    tokens = [m.StepResult([message.handle], [0], []) for _ in range(_NUM_TOKENS - 2)]
    return [m.StepResult([], [], pieces[:1]), *tokens, m.StepResult([], [], pieces[1:])]


async def _post(app: Starlette, path: str, body: bytes) -> bytes:
    """Return the answer to a request, without the middlewares."""
    unread = [{"type": "http.request", "body": body, "more_body": False}]
    parts: list[bytes] = []

    async def receive() -> dict[str, Any]:
        if unread:
            return unread.pop()
        await asyncio.Event().wait()  # cancelled when the answer is complete
        raise AssertionError

    async def send(message: Any) -> None:
        parts.append(message.get("body", b""))

    scope = {
        "type": "http",
        "app": app,
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    await app.router(scope, receive, send)
    return b"".join(parts)
