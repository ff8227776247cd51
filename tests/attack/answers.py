"""Small requests with large answers: what they return, and whether they hold up `/health`."""

from __future__ import annotations

import json

from tests.attack.figures import Figure
from tests.attack.target import Target

OPTIONS = ("--max-model-len", "16384", "--max-num-batched-tokens", "2048")
_LIMIT_MB = 128  # maximum size of an answer
_PROMPT = 12_000  # characters, one token each
REQUESTS = {
    "the whole vocabulary of each prompt token": {"prompt_logprobs": -1, "max_tokens": 1},
    "20 of each prompt token": {"prompt_logprobs": 20, "max_tokens": 1},
    "20 of each echoed token": {"echo": True, "logprobs": 20, "max_tokens": 0},
    "the same, streamed": {"prompt_logprobs": 20, "max_tokens": 1, "stream": True},
    "sixteen answers of it": {"prompt_logprobs": 20, "max_tokens": 1, "n": 16},
}


def attack(target: Target, scale: float = 1.0) -> list[Figure]:
    """Return the size of each answer, and the slowest /health meanwhile."""
    figures = []
    for name, fields in REQUESTS.items():
        with target.watched() as taken:
            body = json.dumps({"prompt": "a" * int(_PROMPT * scale), **fields}).encode()
            head = (
                f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            found = target.ask(head.encode() + body, timeout=60)
        figures.append(Figure(f"{name}: answer", len(found) / 1e6, "MB", _LIMIT_MB))
        figures.append(Figure(f"{name}: status", int(found[9:12] or 0), ""))
        figures.append(Figure(f"{name}: longest /health", max(taken, default=0.0), "s", 1.0))
    return figures
