"""The process in which chat templates run, under limits that the kernel enforces.

`template_process` starts it, and it serves one request after another. One call of a filter may
take any time and memory, so that no check in Python is reached while it does. Therefore:

- CPU time: a timer for each request, whose signal ends the process.
- Memory: a limit on the address space; a template that meets it fails with MemoryError.
- Files: none can be opened or written once the imports are done.

A message is the length of its JSON (8 bytes, big-endian), then the JSON.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["LENGTH_BYTES", "MAX_CHARS", "MAX_MEMORY", "main", "pack"]

MAX_CHARS = 16_000_000  # of a prompt, and of each text in the arguments
MAX_MEMORY = 1 << 30  # bytes of address space, besides those that the process has at the start
LENGTH_BYTES = 8

_MAX_KEPT = MAX_MEMORY // 8  # bytes; a process that still has more after a request is replaced
_MAX_REASON_CHARS = 1000

_Answer = Callable[[dict[str, Any]], dict[str, Any]]


def pack(message: Any) -> bytes:
    """Return `message` as JSON in UTF-8, with unpaired surrogates as they are.

    As escapes, two of them in a row would be read back as one character.
    """
    return json.dumps(message, ensure_ascii=False).encode("utf-8", "surrogatepass")


def main() -> None:
    """Answer the requests from standard input until it ends.

    A request is {"source": str, "seconds": float}, for what the template reads (see
    `template_sandbox.inspect`), and has "values" (dict), too, for its text. The answer is
    {"result": ...} or {"failed": reason}, and "is_last" if the process ends after it.
    """
    # Blocked and ignored signals are inherited from the parent.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    requests = sys.stdin.buffer
    answers = sys.stdout.buffer
    answer = _prepare()
    is_last = False
    while not is_last and (header := requests.read(LENGTH_BYTES)):
        request = json.loads(requests.read(int.from_bytes(header, "big")))
        signal.setitimer(signal.ITIMER_PROF, request["seconds"])
        found = answer(request)
        data = pack(found)
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(len(data).to_bytes(LENGTH_BYTES, "big") + data)
        answers.flush()
        is_last = found["is_last"]
    os._exit(0)  # at once, whatever a template has left


def _prepare() -> _Answer:
    """Import what templates need and set the limits; return the function that answers requests."""
    try:
        # Here, so that a failure is reported, and not in the parent, which needs no Jinja.
        from engine.text import template_sandbox

        size = _memory_gauge()
        start = size()
        _set_limits(start)
    except Exception as error:
        failed = {"failed": f" ({type(error).__name__}: {error})", "is_last": True}
        return lambda _: failed

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        try:
            if "values" in request:
                found: Any = template_sandbox.render(
                    request["source"], request["values"], MAX_CHARS
                )
            else:
                found = template_sandbox.inspect(request["source"])
        except MemoryError:
            return {"failed": f": it took more than {MAX_MEMORY >> 20} MiB", "is_last": True}
        except Exception as error:  # the template is untrusted code, which may raise anything
            why = template_sandbox.reason(error)[:_MAX_REASON_CHARS]
            return {"failed": why, "is_last": size() - start > _MAX_KEPT}
        return {"result": found, "is_last": size() - start > _MAX_KEPT}

    return answer


def _memory_gauge() -> Callable[[], int]:
    """Return a function that tells the bytes of this process's address space; 0 if unknown."""
    try:
        file = os.open("/proc/self/statm", os.O_RDONLY)  # now, as later no file can be opened
    except FileNotFoundError:
        return lambda: 0
    page = resource.getpagesize()
    return lambda: int(os.pread(file, 64, 0).split()[0]) * page


def _set_limits(size: int) -> None:
    """Limit this process, whose address space has `size` bytes."""
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NOFILE: 0,
        resource.RLIMIT_NPROC: 0,
    }
    if size:
        limits[resource.RLIMIT_AS] = size + MAX_MEMORY
    for limit, value in limits.items():
        _, hard = resource.getrlimit(limit)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))
