"""Warm-up requests that an API process sends to itself before it reports ready.

A process's first request takes several times as long as its tenth: modules are not imported yet,
caches are empty, and Python has not specialized its bytecode. These requests pass through the
application and the client, where a stand-in answers them; the engine never sees them.
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

_NUM_ROUNDS = 10  # CPython specializes a function on its eighth call
_NUM_TOKENS = 3  # first, middle and last token: each takes a different path
_COMMON = {"stream": True, "max_tokens": _NUM_TOKENS, "temperature": 0.0}
_BODIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", {"prompt": [0, 0], **_COMMON}),
    ("/v1/completions", {"prompt": "Hello", **_COMMON}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}], **_COMMON}),
)


async def warm_up(client: RequestClient) -> list[bytes]:
    """Stream answers from a separate application instance that neither logs nor requires API keys.

    Returns
    -------
    list of bytes
        Last response of each kind; b"" for kinds that the model does not support (no tokenizer, no
        template).
    """
    app = build_app(client, ServerConfig())
    found = [b""] * len(_BODIES)
    is_refused = [False] * len(_BODIES)  # never retried: a template may hit its time limit
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
    """Return the messages that an engine would send in reply."""
    if not isinstance(message, m.Add):
        return []
    pieces = [
        m.Piece(message.handle, [m.Continuation(0, [0], None, reason, None)], *rest, None)
        for reason, rest in ((None, (False, 0, 0.0, 0.0)), ("length", (True, 0, 0.0, 0.0)))
    ]
    tokens = [m.StepResult([message.handle], [0], []) for _ in range(_NUM_TOKENS - 2)]
    return [m.StepResult([], [], pieces[:1]), *tokens, m.StepResult([], [], pieces[1:])]


async def _post(app: Starlette, path: str, body: bytes) -> bytes:
    """Send a request, bypassing the middlewares, and return the response body."""
    unread = [{"type": "http.request", "body": body, "more_body": False}]
    parts: list[bytes] = []

    async def receive() -> dict[str, Any]:
        if unread:
            return unread.pop()
        await asyncio.Event().wait()  # cancelled when the response is complete
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
        "state": {"key_salt": None},
    }
    await app.router(scope, receive, send)
    return b"".join(parts)
