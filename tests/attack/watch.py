"""Asks for /health again and again, in a process of its own: `python -m tests.attack.watch PORT`.

When its standard input is closed, it prints the time (`time.monotonic`) of each question and the
seconds that its answer has taken, as JSON.
"""

from __future__ import annotations

import json
import select
import socket
import sys
import time

REQUEST = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


def health_seconds(port: int, timeout: float = 20.0) -> float:
    """Return the time that /health takes; `timeout` if the answer is not 200."""
    begin = time.monotonic()
    found = b""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=timeout) as connection:
            connection.sendall(REQUEST)
            while data := connection.recv(65536):
                found += data
    except OSError:
        pass  # not 200
    return time.monotonic() - begin if found[9:12] == b"200" else timeout


def main(port: int, interval: float) -> None:
    """Ask until standard input is closed."""
    answers = []
    while not select.select([sys.stdin], [], [], interval)[0]:
        answers.append((time.monotonic(), health_seconds(port)))
    print(json.dumps(answers))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
