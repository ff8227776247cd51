"""Trial compilation of grammars in a `Worker`, under limits that the kernel enforces.

llguidance bounds its parser, but not the time, memory and stack that compiling some schemas and
grammars takes: a ``multipleOf`` of six digits takes seconds and a gigabyte, and five thousand rules
that refer to each other overflow the stack. A grammar that compiles here also compiles in the
engine: the worker's stack is smaller, and compilation does not depend on the vocabulary (here
single bytes).

All threads of a process share one worker, started by the first grammar. A grammar that hits a limit
ends the worker; the next grammar starts another.
"""

from __future__ import annotations

import json
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

from engine.errors import RequestError
from engine.structured.sources import compile_matcher, library, reason
from engine.text.child_process import (
    Worker,
    WorkerEndedError,
    incoming,
    memory_gauge,
    reply,
    set_limits,
)

__all__ = ["check", "main"]

MAX_SECONDS = 1.0  # CPU time per grammar
MAX_WAIT = 60.0  # wall-clock seconds to wait for an answer
MAX_MEMORY = 512 << 20  # bytes of address space beyond the imports' use
_STACK = 1 << 20  # bytes; the engine's threads have at least 2 MiB
_MAX_ANSWER_BYTES = 4096

_WORKER = Worker("from engine.structured.check_worker import main; main()", _MAX_ANSWER_BYTES)


def check(kind: str, text: str) -> str:
    """Return why a grammar does not compile, or "" if it does.

    Raises
    ------
    RequestError
        If the worker cannot be started.
    """
    try:
        answer = _WORKER.ask(json.dumps([kind, text]).encode(), MAX_SECONDS, wait=MAX_WAIT)
    except WorkerEndedError as error:
        return _cause_of_death(error.code)
    except OSError as error:
        raise RequestError(
            f"the process that checks grammars cannot be started ({error})"
        ) from None
    return answer.decode("utf-8", "replace")


def _cause_of_death(code: int | None) -> str:
    if code is None:
        return f"it takes more than {MAX_WAIT:g} s to compile"
    if code == -signal.SIGPROF:
        return f"it takes more than {MAX_SECONDS:g} s to compile"
    return (
        f"it takes more than {MAX_MEMORY >> 20} MiB to compile, or nests too deeply (exit {code})"
    )


# ---- in the worker's process


class _ByteVocabulary:
    """A vocabulary of the 256 bytes and an end-of-sequence token, for llguidance."""

    is_tokenizer_wrapper = True
    eos_token_id = 256
    bos_token_id = None
    special_token_ids = (256,)

    def __init__(self) -> None:
        self.tokens = [bytes([i]) for i in range(256)] + [b"<eos>"]

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


def main() -> None:
    """Answer each grammar with the reason it does not compile, or with nothing."""
    module = library()
    tokenizer = module.LLTokenizer(_ByteVocabulary(), n_vocab=257, eos_token=[256])
    threading.stack_size(_STACK)
    thread = ThreadPoolExecutor(1)
    # Compile one grammar before setting the limit: it allocates memory needed only once.
    thread.submit(_reason, module, tokenizer, "lark", 'start: "a"').result()
    in_use = memory_gauge()()
    set_limits(in_use + MAX_MEMORY if in_use else 0)
    for request in incoming():
        why = thread.submit(_reason, module, tokenizer, *json.loads(request)).result()
        reply(why.encode("utf-8", "replace"))


def _reason(module: ModuleType, tokenizer: Any, kind: str, text: str) -> str:
    """Compile a grammar and its first mask; return why that failed, or ""."""
    try:
        matcher = compile_matcher(module, tokenizer, kind, text)
    except ValueError as error:
        return str(error)[:400]
    if not reason(matcher):
        matcher.compute_bitmask()
    return reason(matcher)
