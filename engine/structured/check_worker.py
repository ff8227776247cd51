"""The process in which a grammar is compiled first, under limits that the kernel enforces.

llguidance bounds its parser, but not the time, the memory and the stack that some schemas and
grammars take to compile: a ``multipleOf`` of six digits takes seconds and a gigabyte, and five
thousand rules that name each other overflow the stack. What compiles here compiles in the engine,
too: the stack is smaller here, and the vocabulary (of single bytes) does not matter to either.

The parent writes a frame of JSON, [kind, text], and reads one: the reason of failure, or nothing.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
from types import ModuleType
from typing import Any

from engine.structured.sources import compile_matcher, library, reason
from engine.text.child_process import receive, send

__all__ = ["MAX_MEMORY", "MAX_SECONDS", "main"]

MAX_SECONDS = 1.0  # of CPU time for one grammar
MAX_MEMORY = 512 << 20  # bytes of address space, besides those at the start
_STACK = 1 << 20  # bytes; threads of the engine have 2 MiB and more


class _ByteVocabulary:
    """A vocabulary of the 256 bytes and an end, as llguidance reads one."""

    is_tokenizer_wrapper = True
    eos_token_id = 256
    bos_token_id = None
    special_token_ids = (256,)

    def __init__(self) -> None:
        self.tokens = [bytes([i]) for i in range(256)] + [b"<eos>"]

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


def main() -> None:
    """Serve a parent until it closes the pipe."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # blocked signals are inherited
    threading.stack_size(_STACK)
    thread = threading.Thread(target=_serve)
    thread.start()
    thread.join()
    os._exit(0)


def _serve() -> None:
    module = library()
    tokenizer = module.LLTokenizer(_ByteVocabulary(), n_vocab=257, eos_token=[256])
    _check(module, tokenizer, "lark", 'start: "a"')  # memory that every grammar takes
    _limit_memory()
    source = sys.stdin.buffer
    sink = sys.stdout.buffer
    while frame := receive(source):
        kind, text = json.loads(frame)
        signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)
        answer = _check(module, tokenizer, kind, text)
        signal.setitimer(signal.ITIMER_PROF, 0)
        send(sink, answer.encode("utf-8", "replace"))


def _check(module: ModuleType, tokenizer: Any, kind: str, text: str) -> str:
    """Compile a grammar and make its first mask; return why that fails, or ""."""
    try:
        matcher = compile_matcher(module, tokenizer, kind, text)
    except ValueError as error:
        return str(error)[:400]
    if not reason(matcher):
        matcher.compute_bitmask()
    return reason(matcher)


def _limit_memory() -> None:
    limits = {resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: 0}
    try:
        with open("/proc/self/statm") as file:
            size = int(file.read().split()[0]) * resource.getpagesize()
        limits[resource.RLIMIT_AS] = size + MAX_MEMORY
    except OSError:
        pass
    for limit, value in limits.items():
        _, hard = resource.getrlimit(limit)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))
