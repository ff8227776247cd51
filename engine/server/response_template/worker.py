"""Reading of answers by a checkpoint's own format, in a `Worker` under limits of the kernel.

The format's patterns are the checkpoint's, and one may take time exponential in the text's length
without returning to code that could check. So they are compiled and matched in a process whose CPU
time, memory and files the kernel limits. All threads of a process share one worker; a format that
exceeds a limit ends it and fails only its own answer, which is content then.

A request is a JSON array: the kind of format, the format, the names of the functions that may be
called, and the prompt and the text, or null to check the format; or with an object of the functions
and the names of their arguments, for the layout of calls. The answer is {"result": ...} or
{"failed": reason}.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import signal
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from engine.checks import parse_object
from engine.errors import ConfigError
from engine.server.response_template.contents import FormatError, lax_json
from engine.server.response_template.layout import Layout, layout_of, sample
from engine.server.response_template.schema import ResponseSchema
from engine.server.response_template.template import ResponseTemplate
from engine.server.tool_parsers.surrogates import SurrogateGate
from engine.text.child_process import (
    Worker,
    WorkerEndedError,
    incoming,
    memory_gauge,
    reply,
    set_limits,
)

__all__ = ["KINDS", "MAX_SECONDS", "THOUGHTS", "check", "layout", "main", "read"]

MAX_SECONDS = 1.0  # CPU time per answer
MAX_WAIT = 20.0  # wall-clock seconds to wait for the result
MAX_MEMORY = 512 << 20  # bytes of address space beyond the imports' use

KINDS = ("response_template", "response_schema")
"""Keys of tokenizer_config.json that declare a format, the newer one first."""

THOUGHTS = ("thinking", "reasoning_content", "reasoning")
"""Fields of a message that are its reasoning; the first one with a text counts."""

_MAX_ANSWER_BYTES = 64 << 20
_MAX_REASON_CHARS = 300
_CALLS = "tool_calls"

_WORKER = Worker(
    "from engine.server.response_template.worker import main; main()", _MAX_ANSWER_BYTES
)


def check(kind: str, spec: Mapping[str, Any]) -> None:
    """Compile a format.

    Raises
    ------
    ConfigError
        If it cannot be used.
    """
    _ask([kind, spec, [], None, None])


def read(
    kind: str, spec: Mapping[str, Any], names: Collection[str], prompt: str, text: str
) -> dict[str, Any]:
    """Return an answer's "reasoning" and "content" (str), and its "calls" (names and arguments).

    Parameters
    ----------
    kind : str
        One of `KINDS`.
    spec : mapping
        The format.
    names : collection of str
        Functions that may be called; a call of another one is content, or an error in a schema.
    prompt, text : str
        The prompt, or its end, and the answer.

    Raises
    ------
    ConfigError
        If the format cannot be used, does not fit the text, or exceeds a limit.
    """
    found: dict[str, Any] = _ask([kind, spec, list(names), prompt, text])
    return found


def layout(
    kind: str, spec: Mapping[str, Any], functions: Mapping[str, Sequence[str]]
) -> Layout | None:
    """Return how calls of some functions are written; None if that is not known.

    The format has read back texts in this layout, with each function and each of its arguments.

    Parameters
    ----------
    kind, spec
        See `read`.
    functions : mapping of str to sequence of str
        Names of the functions, and those of their arguments.

    Raises
    ------
    ConfigError
        If the format cannot be used, or exceeds a limit.
    """
    fields = _ask([kind, spec, functions, None, None])
    return Layout.from_dict(fields) if fields else None


def _ask(request: list[Any]) -> Any:
    try:
        answer = parse_object(_WORKER.ask(json.dumps(request).encode(), MAX_SECONDS, wait=MAX_WAIT))
    except WorkerEndedError as error:
        is_slow = error.code in (None, -signal.SIGPROF)
        limit = f"{MAX_SECONDS:g} s" if is_slow else f"{MAX_MEMORY >> 20} MiB"
        raise ConfigError(f"{request[0]}: it takes more than {limit}") from None
    except OSError as error:
        raise ConfigError(f"{request[0]}: its process cannot be started ({error})") from None
    if answer is None or "result" not in answer:
        why = "its process sent no answer" if answer is None else answer.get("failed")
        raise ConfigError(f"{request[0]}: {why}")
    return answer["result"]


# ---- in the worker's process


def main() -> None:
    """Answer requests."""
    in_use = memory_gauge()()
    set_limits(in_use + MAX_MEMORY if in_use else 0)
    for request in incoming():
        try:
            answer: dict[str, Any] = {"result": _answer(*json.loads(request))}
        except Exception as error:  # the format is untrusted
            why = (
                str(error) if isinstance(error, FormatError) else f"{type(error).__name__}: {error}"
            )
            answer = {"failed": why[:_MAX_REASON_CHARS]}
        gate = SurrogateGate()
        reply((gate.push(json.dumps(answer)) + gate.finish()).encode())


def _answer(
    kind: str, spec: Any, names: list[str] | dict[str, Any], prompt: str | None, text: str | None
) -> dict[str, Any]:
    form = _compiled(kind, json.dumps(spec))
    if isinstance(names, dict):
        return _checked_layout(form, kind, spec, names)
    if prompt is None or text is None:
        return {}

    def check_calls(field: str, value: Any) -> None:
        for name, _ in _calls(value) if field == _CALLS else ():
            if name not in names:
                raise FormatError(f"{name!r} is no function of the request")

    begun = form.begun(prompt)
    found = _parts(form.message(begun + text, check_calls))
    if begun:  # The answer leaves out the part of the message that is in the prompt.
        before = _parts(form.message(begun, check_calls))
        for key in ("reasoning", "content"):
            found[key] = found[key].removeprefix(before[key])
        found["calls"] = found["calls"][len(before["calls"]) :]
    return found


def _checked_layout(
    form: ResponseTemplate | ResponseSchema, kind: str, spec: Any, functions: dict[str, Any]
) -> dict[str, Any]:
    """Return the fields of a layout that the format reads back; {} without one."""
    plain = layout_of(kind, spec)
    if plain is None:
        return {}
    for found in (dataclasses.replace(plain, has_lines=True), plain):
        if all(_is_read(form, found, *function) for function in functions.items()):
            return found.to_dict()
    return {}


def _is_read(
    form: ResponseTemplate | ResponseSchema, found: Layout, name: str, keys: list[str]
) -> bool:
    """Tell whether a format reads back calls of a function, alone and between texts."""
    values = dict.fromkeys(keys, "x")
    call = [name, values]
    texts = {sample(found, name, values, 2): 2, f"a {sample(found, name, values)} b": 1}
    try:
        read_back = {text: _parts(form.message(text, lambda *_: None)) for text in texts}
    except FormatError:
        return False
    return all(read_back[text]["calls"] == [call] * count for text, count in texts.items())


@functools.lru_cache(maxsize=4)
def _compiled(kind: str, spec: str) -> ResponseTemplate | ResponseSchema:
    given = json.loads(spec)
    if not isinstance(given, dict):
        raise FormatError(f"it must be an object; got {type(given).__name__}")
    return ResponseTemplate(given) if kind == KINDS[0] else ResponseSchema(given)


def _parts(message: dict[str, Any]) -> dict[str, Any]:
    thought = next((message[key] for key in THOUGHTS if message.get(key)), "")
    return {
        "reasoning": _joined(thought),
        "content": _joined(message.get("content") or ""),
        "calls": _calls(message.get(_CALLS)),
    }


def _calls(value: Any) -> list[list[Any]]:
    """Return the names and arguments of calls: one, a list, or lists in a list."""
    calls = value if isinstance(value, list) else [] if value is None else [value]
    return [_call(one) for call in calls for one in (call if isinstance(call, list) else [call])]


def _joined(value: Any) -> str:
    texts = value if isinstance(value, list) else [value]
    if not all(isinstance(text, str) for text in texts):
        raise FormatError(f"no text: {str(value)[:40]!r}")
    return "\n\n".join(texts)


def _call(value: Any) -> list[Any]:
    """Return the name and the arguments of a call."""
    call = value.get("function", value) if isinstance(value, dict) else None
    name = call.get("name") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(name, str):
        raise FormatError("a call has no name")
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        arguments = lax_json(arguments, {})
    if arguments is not None and not isinstance(arguments, dict):
        raise FormatError("the arguments of a call must be an object")
    return [name, arguments or {}]
