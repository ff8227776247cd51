"""Rendering of chat templates in a `Worker`, under limits that the kernel enforces.

All threads of a process share one worker. `LLM` starts it early, because its imports take about
0.1 s; otherwise the first request does. A template that exceeds a limit ends the worker and fails
only its own request.

A single filter call may take any amount of time and memory without returning to Python code that
could check. So the kernel enforces the limits:

- CPU time: a timer per request, whose signal ends the process.
- Memory: a limit on the address space; beyond it a template fails with MemoryError.
- Files: none can be opened or written after the imports.

A request is a JSON object: {"source": str} asks which variables the template reads (see
`template_sandbox.inspect`); an additional "values" (dict) asks for the rendered text, "special"
holding variables that are the same for all requests. With "marks" (the two arguments of
`ContentMarks`), the values carry marks. The answer is {"result": ...} or
{"failed": reason}.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from engine.checks import parse_object
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
from engine.text.content_forms import Forms, probe
from engine.text.content_marks import ContentMarks

if TYPE_CHECKING:
    import jinja2

__all__ = ["ask", "close", "main", "start", "worker_pid"]

MAX_SECONDS = 2.0  # CPU time per request, independent of the machine's load
MAX_WAIT = 60.0  # wall-clock seconds to wait for an answer
MAX_REQUEST_BYTES = 64 << 20
MAX_CHARS = 16_000_000  # maximum characters of a prompt, and of each text in the arguments
MAX_MEMORY = 1 << 30  # bytes of address space beyond the imports' use

_MAX_ANSWER_BYTES = 6 * MAX_CHARS + 4096  # JSON takes up to 6 bytes per character
_MAX_KEPT = MAX_MEMORY // 8  # bytes still held after a request; above this the worker is replaced
_MAX_REASON_CHARS = 1000
_OUT_OF_MEMORY = 12  # exit code of a worker whose template exceeded the memory limit

_WORKER = Worker("from engine.text.template_worker import main; main()", _MAX_ANSWER_BYTES)
close = _WORKER.close


def worker_pid() -> int | None:
    """Return the worker's process id; None if it is not running."""
    return _WORKER.pid


def start() -> None:
    """Start the worker if it is not running, without waiting for its imports.

    Raises
    ------
    TemplateError
        If the worker cannot be started.
    """
    try:
        _WORKER.start()
    except OSError as error:
        raise _cannot_start(error) from error


def ask(
    source: str,
    values: Mapping[str, Any] | None = None,
    special_tokens: Mapping[str, str] | None = None,
    marks: ContentMarks | None = None,
) -> Any:
    """Return a template's text or, without `values`, the result of `template_sandbox.inspect`.

    Parameters
    ----------
    source : str
    values : mapping, optional
        The template's variables; contents of "messages" are brought to the form that it expects.
    special_tokens : mapping of str to str, optional
        More variables, the same for all requests of a model.
    marks : ContentMarks, optional
        The marks that `values`, and so the text, carry.

    Raises
    ------
    RequestError
        If `values` exceed `MAX_REQUEST_BYTES`.
    TemplateError
        If the template fails or exceeds a limit, or the worker cannot be started.
    """
    request: dict[str, Any] = {"source": source}
    if values is not None:
        request["values"] = values
        request["special"] = dict(special_tokens or {})
    if marks is not None:
        request["marks"] = (marks.alphabet, marks.in_keys)
    data = _pack(request, marks is not None)
    if len(data) > MAX_REQUEST_BYTES:
        raise RequestError(
            f"messages, tools and variables must have at most {MAX_REQUEST_BYTES} bytes "
            f"in total, as JSON; got {len(data)}"
        )
    try:
        answer = parse_object(_WORKER.ask(data, MAX_SECONDS, wait=MAX_WAIT))
    except WorkerEndedError as error:
        raise TemplateError(f"the chat template failed: {_cause_of_death(error.code)}") from None
    except OSError as error:
        raise _cannot_start(error) from error
    if answer is None or not answer.keys() & {"failed", "result"}:  # broke out of the sandbox
        close()
        raise TemplateError("the chat template failed: its process did not answer in JSON")
    if "failed" in answer:
        why = answer["failed"] if marks is None else marks.unmark(answer["failed"])
        raise TemplateError(f"the chat template failed{excerpt(why)}")
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


def _pack(message: Any, has_marks: bool) -> bytes:
    """Return `message` as JSON, with unpaired surrogates as they are.

    Of two in a row, written as escapes, JSON would make one character; but never of marks, and
    escapes are written and read ten times as fast.
    """
    return json.dumps(message, ensure_ascii=has_marks).encode("utf-8", "surrogatepass")


# ---- in the worker's process


def main() -> None:
    """Answer requests."""
    answer = _prepare()
    for request in incoming():
        asked = json.loads(request)
        found, is_last = answer(asked)
        reply(_pack(found, "marks" in asked))
        if is_last:
            os._exit(0)  # at once, whatever a template left behind


def _prepare() -> Callable[[dict[str, Any]], tuple[dict[str, Any], bool]]:
    """Import what templates need, set the limits, and return the function that answers requests.

    It returns (answer, is_last); if is_last, the process must end.
    """
    try:
        import resource  # Windows lacks it, and starts no worker

        # Imported here, so that a failure is reported as an answer and the parent needs no Jinja.
        from engine.text import template_sandbox
        from engine.text.marked_sandbox import MarkedSandbox

        size = memory_gauge()
        start = size()
        memory = start + MAX_MEMORY if start else 0
        set_limits(memory, resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC)
    except Exception as error:
        failed = {"failed": f" ({type(error).__name__}: {error})"}
        return lambda _: (failed, True)

    @functools.lru_cache(maxsize=16)
    def compiled(source: str, *marks: str) -> jinja2.Template:
        if marks:
            return MarkedSandbox(MAX_CHARS, ContentMarks(*marks)).compiled(source)
        return template_sandbox.Sandbox(MAX_CHARS).compiled(source)

    @functools.lru_cache(maxsize=16)
    def forms_of(template: jinja2.Template, special: tuple[tuple[str, str], ...]) -> Forms:
        return probe(template.render, dict(special))

    def answer(request: dict[str, Any]) -> tuple[dict[str, Any], bool]:
        source = request["source"]
        try:
            if "values" in request:
                template = compiled(source, *request.get("marks", ()))
                values = request["special"] | request["values"]
                forms = forms_of(template, tuple(request["special"].items()))
                messages = forms.fit(values["messages"], bool(values["tools"]))
                found: Any = template.render(values | {"messages": messages})
            else:
                found = template_sandbox.inspect(source)
        except MemoryError:
            os._exit(_OUT_OF_MEMORY)
        except Exception as error:  # untrusted code may raise anything
            why = template_sandbox.reason(error)[:_MAX_REASON_CHARS]
            return {"failed": why}, size() - start > _MAX_KEPT
        return {"result": found}, size() - start > _MAX_KEPT

    return answer
