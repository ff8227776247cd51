"""Trial compilation of grammars in a `Worker`, under limits that the kernel enforces.

llguidance bounds its parser, but not the time, memory and stack that compiling some schemas and
grammars takes: a ``multipleOf`` of six digits takes seconds and a gigabyte, and five thousand rules
that refer to each other overflow the stack. A grammar that compiles here also compiles in the
engine: the worker's stack is smaller, and compilation does not depend on the vocabulary (here
single bytes). JSON schemas are rewritten here too (`json_schema`), so that takes as little.

Some limits are hit only by a text, at a row of too many alternatives. So the worker also follows a
few texts of the grammar.

All threads of a process share one worker, started by the first grammar. A grammar that hits a limit
ends the worker; the next grammar starts another.
"""

from __future__ import annotations

import functools
import json
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from engine.errors import RequestError
from engine.structured.json_schema import normalized
from engine.structured.references import SchemaError
from engine.structured.sources import (
    MAX_REASON_CHARS,
    STACK_BYTES,
    compile_matcher,
    library,
    reason,
)
from engine.structured.structural_tag import normalized_tag
from engine.text.child_process import (
    Worker,
    WorkerEndedError,
    incoming,
    memory_gauge,
    reply,
    set_limits,
)

__all__ = ["Checked", "check", "main"]

MAX_SECONDS = 2.0  # CPU time per grammar
MAX_WAIT = 60.0  # wall-clock seconds to wait for an answer
MAX_MEMORY = 512 << 20  # bytes of address space beyond the imports' use
_STACK = STACK_BYTES // 2  # less than the engine has
_MAX_ANSWER_BYTES = 16 << 20
_MAX_WARNINGS = 20
_PREFERENCE = 0.9
_WALKS = 3  # texts of a grammar that are followed
_WALK_BYTES = 100
_WALK_SECONDS = 0.2  # for all walks

_WORKER = Worker("from engine.structured.check_worker import main; main()", _MAX_ANSWER_BYTES)


@dataclass(frozen=True)
class Checked:
    """What the worker found.

    Attributes
    ----------
    why : str
        Why the grammar cannot be used; "" if it can.
    text : str
        What to compile: a schema, rewritten; other grammars are unchanged.
    warnings : tuple of str
        What of a schema is not enforced, and is no constraint.
    """

    why: str
    text: str = ""
    warnings: tuple[str, ...] = ()


def check(kind: str, text: str) -> Checked:
    """Compile a grammar in the worker.

    Raises
    ------
    RequestError
        If the worker cannot be started.
    """
    try:
        answer = _WORKER.ask(json.dumps([kind, text]).encode(), MAX_SECONDS, wait=MAX_WAIT)
    except WorkerEndedError as error:
        return Checked(_cause_of_death(error.code))
    except OSError as error:
        raise RequestError(
            f"the process that checks grammars cannot be started ({error})"
        ) from None
    try:
        why, ours, warnings = json.loads(answer)
    except (ValueError, TypeError, RecursionError) as error:
        return Checked(f"the process that checks grammars sent no answer ({error})")
    return Checked(why, text if ours is None else ours, tuple(warnings))


def _cause_of_death(code: int | None) -> str:
    if code is None:
        return f"it takes more than {MAX_WAIT:g} s to compile"
    if code == -signal.SIGPROF:
        return f"it takes more than {MAX_SECONDS:g} s to compile"
    if code == -signal.SIGSEGV:
        return f"it nests too deeply for a stack of {_STACK >> 20} MiB"
    return f"it takes more than {MAX_MEMORY >> 20} MiB to compile (exit {code})"


# ---- in the worker's process


class ByteVocabulary:
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
    tokenizer = module.LLTokenizer(ByteVocabulary(), n_vocab=257, eos_token=[256])
    threading.stack_size(_STACK)
    thread = ThreadPoolExecutor(1)
    # Compile one grammar before setting the limit: it allocates memory needed only once.
    thread.submit(_reason, module, tokenizer, "lark", 'start: "a"').result()
    in_use = memory_gauge()()
    set_limits(in_use + MAX_MEMORY if in_use else 0)
    for request in incoming():
        answer = thread.submit(_answer, module, tokenizer, *json.loads(request)).result()
        reply(json.dumps(answer).encode())


def _answer(
    module: ModuleType, tokenizer: Any, kind: str, text: str
) -> tuple[str, str | None, list[str]]:
    """Return the fields of `Checked`; the text is None if it is unchanged."""
    rewrite = {"json_schema": normalized, "structural_tag": normalized_tag}.get(kind)
    if rewrite is None:
        return _reason(module, tokenizer, kind, text), None, []
    accepts = functools.partial(_accepts, module, tokenizer)
    try:
        ours, warnings = rewrite(text, accepts, functools.partial(_knows, module, tokenizer))
    except (SchemaError, MemoryError) as error:
        return str(error)[:MAX_REASON_CHARS] or "it takes too much memory", None, []
    return _reason(module, tokenizer, kind, ours), ours, warnings[:_MAX_WARNINGS]


def _accepts(module: ModuleType, tokenizer: Any, schema: dict[str, Any], text: str) -> bool:
    """Return whether a schema of strings allows `text`.

    Raises
    ------
    SchemaError
        If the schema does not compile.
    """
    matcher = compile_matcher(module, tokenizer, "json_schema", json.dumps(schema))
    if why := reason(matcher):
        raise SchemaError(why)
    ids = list(json.dumps(text, ensure_ascii=False).encode("utf-8", "surrogatepass"))
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def _knows(module: ModuleType, tokenizer: Any, name: str) -> bool:
    """Return whether llguidance enforces a format."""
    schema = json.dumps({"type": "string", "format": name})
    return not compile_matcher(module, tokenizer, "json_schema", schema).is_error()


def _reason(module: ModuleType, tokenizer: Any, kind: str, text: str) -> str:
    """Compile a grammar and follow some of its texts; return why that failed, or ""."""
    try:
        matcher = compile_matcher(module, tokenizer, kind, text)
    except ValueError as error:
        return str(error)[:MAX_REASON_CHARS]
    if not reason(matcher):
        matcher.compute_bitmask()
    return reason(matcher) or _walk(matcher)


def _walk(start: Any) -> str:
    """Follow texts of a grammar, each the beginning of one by chance; return why that failed."""
    chance = random.Random(0)
    deadline = time.thread_time() + _WALK_SECONDS
    for _ in range(_WALKS):
        matcher = start.deep_copy()
        for _ in range(_WALK_BYTES):
            mask = int.from_bytes(matcher.compute_bitmask(), "little") & (1 << 256) - 1
            if not mask or time.thread_time() > deadline:
                break
            matcher.consume_token(_some_byte(mask, chance))
        if why := reason(matcher):
            return why
    return ""


def _some_byte(mask: int, chance: random.Random) -> int:
    """Return a byte of a mask; preferably one that leads to new parts of a schema's grammar."""
    for preferred in (b"{[", b'",:'):
        found = [byte for byte in preferred if mask >> byte & 1]
        if found and chance.random() < _PREFERENCE:
            return chance.choice(found)
    shift = chance.randrange(256)
    rest = mask >> shift or mask
    return (shift if mask >> shift else 0) + (rest & -rest).bit_length() - 1
