"""Bytes around requests: trailers, chunk extensions, bodies that nobody reads, blank lines.

Each stream is sent for a while, as fast as the server takes it, on one connection after the other.
The memory of the server must not grow by it.
"""

from __future__ import annotations

import time

from tests.attack.figures import Figure
from tests.attack.target import Target

_SECONDS = 3.0  # duration of each stream
_LIMIT_MB = 4  # growth; the allocator keeps some ordinary buffers
_BLOCK = 1 << 16
_CHUNKED = b"%b HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
_LONG = b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000000000\r\n\r\n"
_GET = _CHUNKED % b"GET /health"
_POST = _CHUNKED % b"POST /v1/completions"
STREAMS = {
    # name: (what is sent once, what is repeated)
    "trailers": (_GET + b"0\r\n", b"X-A: " + b"a" * 1000 + b"\r\n"),
    "trailers of a POST": (_POST + b"0\r\n", b"X-A: " + b"a" * 1000 + b"\r\n"),
    "one endless trailer": (_GET + b"0\r\nX-A: ", b"a" * 1000),
    "chunk extensions": (_GET, b"1;" + b"a" * 1000 + b"\r\nb\r\n"),
    "one endless chunk extension": (_GET + b"1;", b"a" * 1000),
    "zeros before a chunk's size": (_GET, b"0" * 1000),
    "a chunked body of a GET": (_GET, b"400\r\n" + b"b" * 1024 + b"\r\n"),
    "a body of a 404": (_LONG % b"/nowhere", b"b" * 1000),
    "a body of a 415": (_LONG % b"/v1/completions", b"b" * 1000),
    "blank lines": (b"", b"\r\n"),
    "headers": (b"GET /health HTTP/1.1\r\n", b"X-A: " + b"a" * 100 + b"\r\n"),
    "a request target": (b"GET /", b"a" * 1000),
    "pipelined requests": (b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"),
}


def attack(target: Target, scale: float = 1.0) -> list[Figure]:
    """Return the growth of the server's memory by each stream, and the slowest /health."""
    figures = []
    with target.watched() as taken:
        for name, (head, part) in STREAMS.items():
            before = target.memory()
            sent, most = send(target, head, part, _SECONDS * scale)
            growth = max(most - before, 0)
            figures.append(Figure(f"{name}: memory", growth / 1e6, "MB", _LIMIT_MB))
            figures.append(Figure(f"{name}: sent", sent / 1e6, "MB"))
    figures.append(Figure("longest /health", max(taken), "s", 1.0))
    return figures


def send(target: Target, head: bytes, part: bytes, seconds: float) -> tuple[int, int]:
    """Send `head` and then `part` again and again; return the bytes sent, and the most memory."""
    block = part * (_BLOCK // len(part) + 1)
    end = time.monotonic() + seconds
    sent, most = 0, 0
    while time.monotonic() < end:
        with target.connect(timeout=0.5) as connection:
            try:
                connection.sendall(head)
                while time.monotonic() < end:
                    sent += connection.send(block)
                    most = max(most, target.memory())
            except TimeoutError:
                pass  # the server does not read
            except OSError:
                time.sleep(0.01)  # the server has closed the connection
        most = max(most, target.memory())
    return sent, most
