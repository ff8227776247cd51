"""Worker process of the load generator, started by `driver`.

Protocol: it reads the plan (one line of JSON) from standard input, and then the start time. It
writes "ready", a line "." after each request, and finally one line of JSON with all answers. It
exits when its standard input is closed.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import importlib.util
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from engine.commands.bench_serve.connection import Answer, ConnectionPool

__all__ = ["event_loop_name", "main", "run_jobs"]

_BODY_BYTES = (1 << 20, 64 << 10)  # maximum bytes per response: fixed part, and per token


def event_loop_name() -> str:
    """Return the workers' event loop: uvloop if installed, else asyncio."""
    return "uvloop" if importlib.util.find_spec("uvloop") else "asyncio"


async def run_jobs(plan: dict[str, Any], start: float, note: Callable[[], None]) -> list[Answer]:
    """Send the requests of a plan, each at its time; return the answers in order.

    Parameters
    ----------
    plan : dict
        ``host``, ``port``, ``tls``, ``path``, ``headers``; ``jobs``, a list of (seconds from the
        start, ascending; body; max_tokens); ``max_concurrency`` (0: no limit); ``timeout`` in s.
    start : float
        Start time on the `time.monotonic` clock.
    note : callable
        Called after each request.
    """
    pool = ConnectionPool(plan["host"], plan["port"], tls=plan["tls"])
    places = asyncio.Semaphore(plan["max_concurrency"] or len(plan["jobs"]) or 1)
    fixed, each = _BODY_BYTES

    async def one(data: bytes, max_tokens: int) -> Answer:
        answer = Answer()
        async with places:
            most = fixed + each * max_tokens
            await pool.send(data, answer, max_body=most, timeout=plan["timeout"])
        note()
        return answer

    ready = [(moment, _encode(plan, body), most) for moment, body, most in plan["jobs"]]
    # These objects live for the whole run: exempt them from garbage collection.
    gc.collect()
    gc.freeze()
    try:
        tasks = []
        for moment, *job in ready:  # in order, even for requests with equal times
            if (delay := start + moment - time.monotonic()) > 0:
                await asyncio.sleep(delay)
            tasks.append(asyncio.ensure_future(one(*job)))
        return await asyncio.gather(*tasks)
    finally:
        pool.close()


def _encode(plan: dict[str, Any], body: dict[str, Any]) -> bytes:
    content = json.dumps(body, separators=(",", ":")).encode()
    fields = {**plan["headers"], "Content-Length": str(len(content))}
    lines = [f"POST {plan['path']} HTTP/1.1", *(f"{k}: {v}" for k, v in fields.items()), "", ""]
    return "\r\n".join(lines).encode("latin-1") + content


def main() -> None:
    """Read the plan, run it, and write the answers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent terminates its workers
    plan = json.loads(sys.stdin.buffer.readline())
    _say("ready")
    start = float(sys.stdin.buffer.readline())  # last line of input: nothing is left in the buffer
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    loop = importlib.import_module(event_loop_name()).new_event_loop()
    answers = loop.run_until_complete(run_jobs(plan, start, lambda: _say(".")))
    loop.close()
    _say(json.dumps([_as_row(answer) for answer in answers]))


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _end_with_the_parent() -> None:
    while os.read(0, 4096):
        pass
    os._exit(1)


def _as_row(answer: Answer) -> list[Any]:
    return [
        *(answer.start, answer.end, answer.times.tolist()),
        *(answer.num_prompt_tokens, answer.num_output_tokens),
        *(answer.finish_reason, answer.failure, answer.detail),
    ]
