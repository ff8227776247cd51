"""A small HTTP server that answers as a test says: streams with known delays, and broken ones."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class Exchange:
    """One request, and the means to answer it."""

    method: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    writer: asyncio.StreamWriter
    number: int

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def head(self, status: int = 200, kind: str = "text/event-stream") -> None:
        lines = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n"
        await self.send(lines.encode())

    async def chunk(self, data: bytes) -> None:
        await self.send(b"%x\r\n%s\r\n" % (len(data), data))

    async def event(self, value: Any) -> None:
        text = value if isinstance(value, str) else json.dumps(value)
        await self.chunk(f"data: {text}\n\n".encode())

    async def token(self, text: str, finish_reason: str | None = None) -> None:
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish_reason}
        is_chat = self.path.endswith("/chat/completions")
        choice |= {"delta": {"content": text}} if is_chat else {"text": text}
        await self.event({"choices": [choice]})

    async def end(self, num_prompt: int, num_output: int) -> None:
        usage = {"prompt_tokens": num_prompt, "completion_tokens": num_output}
        await self.event({"choices": [], "usage": usage})
        await self.event("[DONE]")
        await self.chunk(b"")

    async def json(self, status: int, value: Any) -> None:
        body = json.dumps(value).encode()
        head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\n"
        await self.send(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)

    async def stream(self, gap: float = 0.0, first: float = 0.0) -> None:
        """Answer as an engine does: as many tokens as asked for, `gap` seconds apart."""
        count = self.body.get("max_tokens") or self.body["max_completion_tokens"]
        await asyncio.sleep(first)
        await self.head()
        for index in range(count):
            if index:
                await asyncio.sleep(gap)
            await self.token("a", "length" if index == count - 1 else None)
        await self.end(7, count)

    def drop(self) -> None:
        self.writer.transport.abort()


Script = Callable[[Exchange], Awaitable[None]]


class ScriptedServer:
    """Runs on a thread of its own; `requests` has what has come."""

    def __init__(self, script: Script) -> None:
        self.requests: list[Exchange] = []
        self.num_connections = 0
        self.in_flight = self.most_in_flight = 0
        self._script = script
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._tasks: set[Any] = set()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> ScriptedServer:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        assert not self._thread.is_alive()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0, backlog=2048)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        task = asyncio.current_task()
        self._tasks.add(task)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while await self._one(reader, writer):
                pass
        writer.transport.abort()
        self._tasks.discard(task)

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, path, _ = head[0].split()
        headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in head[1:-2])}
        raw = await reader.readexactly(int(headers.get("content-length", 0)))
        body = json.loads(raw) if raw else {}
        exchange = Exchange(method, path, headers, body, writer, len(self.requests))
        self.requests.append(exchange)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await self._script(exchange)
        finally:
            self.in_flight -= 1
        return not writer.transport.is_closing()
