"""Many connections: clients that send a byte now and then, and thousands that come at once.

The slow ones try to use up the server's connections; requests and /health have to be answered
meanwhile. Of those that come at once, as many as fit are served, and each other one gets a 503 with
Retry-After and an error in JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import threading
import time
from collections import Counter

from tests.attack.figures import Figure
from tests.attack.target import Target

_MAX_CONNECTIONS = 8192  # the server's default
_NUM_OTHERS = 16  # connections of those that ask for /health
_NUM_AT_ONCE = 10_000
_SECONDS = 12.0  # duration of the slow connections
_NUM_PARTS = 20
_SPARE_FILES = 256
_BODY = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
_REQUEST = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(_BODY), _BODY)
)
_MODELS = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
_GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
_POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
SLOW = (  # what is sent at first, and again and again
    (b"", b""),
    (b"", b"\r\n"),
    (_GET, b"X: a\r\n"),
    (_POST + b"Content-Length: 100000\r\n\r\n", b" "),
    (_GET + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"X: a\r\n"),
    (b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n", b" "),
    (_GET + b"\r\n", b"\r\n"),
)


class _Client(asyncio.Protocol):
    """Keeps what the server sends."""

    def __init__(self) -> None:
        self.received = b""
        self.part = b""  # what a slow client sends again and again
        self.is_open = True
        self.closed = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.received += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if not self.closed.done():
            self.closed.set_result(None)

    def send(self, data: bytes) -> None:
        if self.is_open:
            self.transport.write(data)


async def _connect(target: Target) -> _Client | None:
    loop = asyncio.get_running_loop()
    try:
        _, client = await loop.create_connection(_Client, "127.0.0.1", target.port)
    except OSError:
        return None
    return client


def attack(target: Target, scale: float = 1.0) -> list[Figure]:
    """Return how requests and /health fare beside slow clients, and what a crowd is answered."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    most = hard - _SPARE_FILES
    figures = _slow(target, min(most, int(_MAX_CONNECTIONS * scale)), _SECONDS * scale)
    count = min(most, int(_NUM_AT_ONCE * scale))
    for name, waits in (("at once", False), ("connected, then at once", True)):
        with target.watched() as taken:
            answers = asyncio.run(_all_at_once(target, count, waits=waits))
        served = answers.pop("200", 0)
        refused = answers.pop("503", 0)
        figures += [
            Figure(f"{name}: clients", count, ""),
            Figure(f"{name}: of those that fit, not served",
                   max(0, min(count, _MAX_CONNECTIONS - _NUM_OTHERS) - served), "", 0),
            Figure(f"{name}: refused with 503 and Retry-After", refused, ""),
            Figure(f"{name}: answered in another way", sum(answers.values()), "", 0),
            Figure(f"{name}: longest /health", max(taken, default=0.0), "s", 1.0),
        ]  # fmt: skip
    return figures


async def _all_at_once(target: Target, count: int, *, waits: bool) -> Counter[str]:
    """Return how often each status was answered; "503" only if it is complete."""

    async def ask(client: _Client | None) -> str:
        if client is None:
            return "not connected"
        client.send(_MODELS)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(client.closed, 60)
        client.transport.abort()
        status = client.received[9:12].decode()
        head, _, body = client.received.partition(b"\r\n\r\n")
        if status == "503" and not (b"retry-after:" in head.lower() and body.startswith(b"{")):
            return "503 without Retry-After or JSON"
        return status or "nothing"

    async def one() -> str:
        return await ask(await _connect(target))

    if not waits:
        return Counter(await asyncio.gather(*(one() for _ in range(count))))
    clients = await asyncio.gather(*(_connect(target) for _ in range(count)))
    await asyncio.sleep(1.5)
    return Counter(await asyncio.gather(*map(ask, clients)))


def _slow(target: Target, count: int, seconds: float) -> list[Figure]:
    """Keep `count` connections busy with bytes that complete nothing; ask beside them."""
    is_over = threading.Event()

    async def trickle() -> None:
        clients: list[_Client | None] = []
        while not is_over.is_set():
            kept = [client for client in clients if client is not None and client.is_open]
            new = await asyncio.gather(*(_connect(target) for _ in range(count - len(kept))))
            for number, client in enumerate(new):
                if client is not None:
                    client.part = SLOW[number % len(SLOW)][1]
                    client.send(SLOW[number % len(SLOW)][0])
            clients = kept + list(new)
            for first in range(_NUM_PARTS):  # each once a second, not all at the same time
                for client in kept[first::_NUM_PARTS]:
                    client.send(client.part)
                await asyncio.sleep(1 / _NUM_PARTS)
        for client in clients:
            if client is not None:
                client.transport.abort()
        await asyncio.sleep(0)

    thread = threading.Thread(target=lambda: asyncio.run(trickle()))
    thread.start()
    answers: Counter[str] = Counter()
    longest = 0.0
    begin = time.monotonic()
    try:
        with target.watched() as taken:
            while time.monotonic() - begin < seconds:
                asked = time.monotonic()
                try:
                    status = target.ask(_REQUEST, timeout=10)[9:12].decode()
                except OSError:
                    status = "none"
                answers[status] += time.monotonic() - begin > 3  # all connections are open
                longest = max(longest, time.monotonic() - asked)
    finally:
        is_over.set()
        thread.join()
    served = answers.pop("200", 0)
    return [
        Figure("slow connections", count, ""),
        Figure("beside slow ones: requests served", served, ""),
        Figure("beside slow ones: requests not served", sum(answers.values()), "", 0),
        Figure("beside slow ones: longest request", longest, "s"),
        Figure("beside slow ones: longest /health", max(taken, default=0.0), "s", 1.0),
    ]
