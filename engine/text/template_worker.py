"""Rendering of chat templates in a `Worker`, under limits that the kernel enforces.

All threads of a process share one worker. `LLM` starts it early, as its imports take about 0.1 s;
otherwise the first request does. A template that exceeds a limit ends the worker and fails its own
request.

A single call of a filter may take any time and memory without reaching a check in Python. So the
limits are the kernel's:

- CPU time: a timer for each request, whose signal ends the process.
- Memory: a limit on the address space; beyond it a template fails with MemoryError.
- Files: none can be opened or written once the imports are done.

A request is a JSON object: {"source": str} asks which variables the template reads (see
`template_sandbox.inspect`); with "values" (dict) it asks for the rendered text. The answer is
{"result": ...} or {"failed": reason}.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
from collections.abc import Callable, Mapping
from typing import Any

from engine.errors import RequestError, TemplateError
from engine.model_files import excerpt
from engine.text.child_process import (
    Worker,
    WorkerEndedError,
    incoming,
    memory_gauge,
    reply,
    set_limits,
)

__all__ = ["ask", "close", "main", "start", "worker_pid"]

MAX_SECONDS = 2.0  # CPU time of one request, independent of the machine's load
MAX_WAIT = 60.0  # wall-clock seconds for an answer
MAX_REQUEST_BYTES = 64 << 20
MAX_CHARS = 16_000_000  # characters of a prompt, and of each text in the arguments
MAX_MEMORY = 1 << 30  # bytes of address space beyond what the imports take

_MAX_ANSWER_BYTES = 6 * MAX_CHARS + 4096  # JSON takes up to 6 bytes per character
_MAX_KEPT = MAX_MEMORY // 8  # bytes held after a request, above which the worker is replaced
_MAX_REASON_CHARS = 1000
_OUT_OF_MEMORY = 12  # exit code of a worker whose template exceeded the limit on memory

_WORKER = Worker("from engine.text.template_worker import main; main()", _MAX_ANSWER_BYTES)
close = _WORKER.close


def worker_pid() -> int | None:
    """Return the process id of the worker; None if it does not run."""
    return _WORKER.pid


def start() -> None:
    """Start the worker, unless it runs, and return without waiting for its imports.

    Raises
    ------
    TemplateError
        If it cannot be started.
    """
    try:
        _WORKER.start()
    except OSError as error:
        raise _cannot_start(error) from error


def ask(source: str, values: Mapping[str, Any] | None = None) -> Any:
    """Return the text of a template; without `values`, the result of `template_sandbox.inspect`.

    Raises
    ------
    RequestError
        If `values` take more than `MAX_REQUEST_BYTES`.
    TemplateError
        If the template fails or exceeds a limit, or the worker cannot be started.
    """
    request = {"source": source} if values is None else {"source": source, "values": values}
    data = _pack(request)
    if len(data) > MAX_REQUEST_BYTES:
        raise RequestError(
            f"messages, tools and variables must have at most {MAX_REQUEST_BYTES} bytes "
            f"in total, as JSON; got {len(data)}"
        )
    try:
        answer = json.loads(_WORKER.ask(data, MAX_SECONDS, wait=MAX_WAIT))
    except WorkerEndedError as error:
        raise TemplateError(f"the chat template failed: {_cause_of_death(error.code)}") from None
    except OSError as error:
        raise _cannot_start(error) from error
    except ValueError:  # a template has broken out of the sandbox
        close()
        raise TemplateError(
            "the chat template failed: its process did not answer in JSON"
        ) from None
    if "failed" in answer:
        raise TemplateError(f"the chat template failed{excerpt(answer['failed'])}")
    return answer["result"]


def _cannot_start(error: OSError) -> TemplateError:
    return TemplateError(f"the process that runs chat templates cannot be started ({error})")


def _cause_of_death(code: int | None) -> str:
    if code is None:
        return f"it did not answer within {MAX_WAIT:g} s"
    if code == -signal.SIGPROF:
        return f"it ran longer than {MAX_SECONDS:g} s"
    if code in (-signal.SIGKILL, -signal.SIGTERM):
        return "its process was killed"
    if code == _OUT_OF_MEMORY:
        return f"it took more than {MAX_MEMORY >> 20} MiB"
    how = f"exit code {code}"
    with contextlib.suppress(ValueError):
        how = signal.Signals(-code).name
    return f"it took more than {MAX_MEMORY >> 20} MiB, or crashed ({how})"


def _pack(message: Any) -> bytes:
    """Return `message` as JSON in UTF-8, with unpaired surrogates as they are.

    Two of them in a row, written as escapes, would be read back as one character.
    """
    return json.dumps(message, ensure_ascii=False).encode("utf-8", "surrogatepass")


# ---- in the worker's process


def main() -> None:
    """Answer requests."""
    answer = _prepare()
    for request in incoming():
        found, is_last = answer(json.loads(request))
        reply(_pack(found))
        if is_last:
            os._exit(0)  # at once, whatever a template has left behind


def _prepare() -> Callable[[dict[str, Any]], tuple[dict[str, Any], bool]]:
    """Import what templates need, set the limits, and return the function that answers requests.

    The function returns (answer, is_last): with is_last the process has to end.
    """
    try:
        # Imported here: a failure is reported as an answer, and the parent needs no Jinja.
        from engine.text import template_sandbox

        size = memory_gauge()
        start = size()
        memory = start + MAX_MEMORY if start else 0
        set_limits(memory, resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC)
    except Exception as error:
        failed = {"failed": f" ({type(error).__name__}: {error})"}
        return lambda _: (failed, True)

    def answer(request: dict[str, Any]) -> tuple[dict[str, Any], bool]:
        source = request["source"]
        try:
            if "values" in request:
                found: Any = template_sandbox.render(source, request["values"], MAX_CHARS)
            else:
                found = template_sandbox.inspect(source)
        except MemoryError:
            os._exit(_OUT_OF_MEMORY)
        except Exception as error:  # the template is untrusted code, which may raise anything
            why = template_sandbox.reason(error)[:_MAX_REASON_CHARS]
            return {"failed": why}, size() - start > _MAX_KEPT
        return {"result": found}, size() - start > _MAX_KEPT

    return answer
