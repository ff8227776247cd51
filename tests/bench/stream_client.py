"""Client of benchmarks, a process of its own: sends requests at once, reads streams as raw bytes.

Standard input: a JSON object with host, port, path and bodies. Standard output: a JSON object with
the seconds from the first connection to the last byte, the seconds until each stream has begun, and
what each stream has said. Frames are parsed once all bytes have arrived.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time


class _Stream(asyncio.Protocol):
    """One request; keeps the response, until the server closes the connection."""

    def __init__(self, request):
        self._request = request
        self.pieces = []
        self.begun = None  # time of the first frame
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport):
        transport.write(self._request)

    def data_received(self, data):
        if self.begun is None and b"data: " in data:
            self.begun = time.perf_counter()
        self.pieces.append(data)

    def connection_lost(self, exc):
        self.ended.set_result(None)


def _request(load, body):
    data = json.dumps(body).encode()
    head = f"POST {load['path']} HTTP/1.1\r\nHost: {load['host']}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def _body(response):
    """Return the body of a chunked response."""
    head, _, rest = response.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(response[:1000].decode(errors="replace"))
    chunks = []
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        chunks.append(rest[: int(size, 16)])
        rest = rest[int(size, 16) + 2 :]
    return b"".join(chunks)


def _said(response):
    """Return the usage, the number of frames and the texts of a stream."""
    found = {"reasoning": "", "content": "", "arguments": "", "text": "", "frames": 0}
    lines = _body(response).decode().split("\n\n")
    if lines[-2:] != ["data: [DONE]", ""]:
        raise RuntimeError(f"a stream has no end: {lines[-2:]}")
    for line in lines[:-2]:
        event = json.loads(line.removeprefix("data: "))
        found["frames"] += 1
        found["usage"] = event.get("usage") or found.get("usage")
        for choice in event["choices"]:
            delta = choice.get("delta", {})
            found["text"] += choice.get("text") or ""
            found["reasoning"] += delta.get("reasoning_content") or ""
            found["content"] += delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                found["arguments"] += call["function"]["arguments"]
    return found


async def _run(load):
    loop = asyncio.get_running_loop()
    streams = [_Stream(_request(load, body)) for body in load["bodies"]]
    start = time.perf_counter()
    for stream in streams:
        await loop.create_connection(lambda stream=stream: stream, load["host"], load["port"])
    await asyncio.gather(*(stream.ended for stream in streams))
    return streams, start, time.perf_counter()


def main():
    streams, start, end = asyncio.run(_run(json.load(sys.stdin)))
    said = [_said(b"".join(stream.pieces)) for stream in streams]
    begun = [stream.begun - start for stream in streams]
    json.dump({"seconds": end - start, "begun": begun, "streams": said}, sys.stdout)


if __name__ == "__main__":
    main()
