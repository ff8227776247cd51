"""Encodes with steps that are not known to be harmless, in a process that can be stopped.

`known_steps` says which steps these are. The tokenizers library cannot be interrupted: a
normalizer that doubles its text forty times, or a regular expression that backtracks, would hang
or abort the caller. So they run in a child, with limits that the kernel enforces on its memory and
on the CPU time of each text. What kills the child is a `RequestError` for that text; the next
one starts a new child.

The parent writes frames (length in 8 bytes, content) to the child's stdin: a JSON object with
tokens to add, the ``tokenizer.json``, then texts. The child answers each but the first.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import Any, BinaryIO

import tokenizers
from tokenizers import AddedToken

from engine.errors import ConfigError, EngineError, RequestError
from engine.text.child_process import end, receive, send, start
from engine.text.library_errors import library_errors
from engine.text.tokenizer_json import build_backend, parse

__all__ = ["WorkerEncoder", "encode_here"]

MAX_MEMORY = 2 << 30  # bytes of the child's address space
LOAD_SECONDS = 20.0  # of CPU time; a file of 64 MiB takes 5
TEXT_SECONDS = 5.0  # of CPU time, for any text,
SECONDS_PER_CHARACTER = 1e-5  # and in addition for its length, ten times what BPE takes
MAX_IDS = 1 << 24  # of one text
_LONG_TEXT = 4096  # characters, which take a few milliseconds

_PROBE = "".join(map(chr, range(32, 127))) + "\n\t é中"
_CODE = (
    "import json, sys; sys.path[:0] = json.loads(sys.argv[1]); "
    "from engine.text.encode_worker import main; main()"
)


def encode_here(
    backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool
) -> tuple[list[int], bool]:
    """Encode in this process.

    Returns
    -------
    ids : list of int
    is_added : bool
        If the first two ids are equal, whether the post-processor added the first; else False.

    Raises
    ------
    RequestError
        If the library fails.
    """
    with library_errors(RequestError, "the text cannot be encoded"):
        if len(text) > _LONG_TEXT or os.environ.get("TOKENIZERS_PARALLELISM") == "false":
            # Python's lock is free meanwhile, for the streams of a server, and no offsets are made.
            # Not for every text, as the library may start a thread for each core.
            [encoding] = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        else:
            encoding = backend.encode(text, add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        # The mask is 1 for tokens that the post-processor added, 0 for those in the text.
        is_added = len(ids) > 1 and ids[0] == ids[1] and bool(encoding.special_tokens_mask[0])
    return ids, is_added


class WorkerEncoder:
    """Encodes in a child process.

    Parameters
    ----------
    data : bytes
        The ``tokenizer.json``.
    added : sequence of AddedToken
        Tokens to add to those of the file.
    step : str
        The step that is not known to be harmless, for messages.

    Raises
    ------
    ConfigError
        If the child cannot load the file, or a short text exceeds its limits.
    """

    def __init__(self, data: bytes, added: Sequence[AddedToken], step: str) -> None:
        self._data = data
        self._added = json.dumps([_fields_of(token) for token in added]).encode()
        self._step = step
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._pid = 0
        self._ask("", True, ConfigError)
        with contextlib.suppress(RequestError):  # it says nothing about other texts
            self._ask(_PROBE, True, ConfigError)

    def __call__(self, text: str, add_special_tokens: bool) -> tuple[list[int], bool]:
        """Encode `text`; see `encode_here`.

        Raises
        ------
        RequestError
            If the library fails, or takes more than the limits on time, memory and ids.
        """
        return self._ask(text, add_special_tokens, RequestError)

    def _ask(
        self, text: str, add_special_tokens: bool, kind: type[EngineError]
    ) -> tuple[list[int], bool]:
        flag = b"1" if add_special_tokens else b"0"
        with self._lock:
            process = self._running(kind)
            answer = self._exchange(process, [flag + text.encode("utf-8")], kind)
        if answer[:1] == b"e":
            raise (kind if not text else RequestError)(answer[1:].decode("utf-8", "replace"))
        return array.array("I", answer[2:]).tolist(), answer[1:2] == b"1"

    def _running(self, kind: type[EngineError]) -> subprocess.Popen[bytes]:
        """Return the child, which is started if there is none (or only that of a parent)."""
        if self._process is not None and self._pid == os.getpid():
            return self._process
        try:
            process = _start()
        except OSError as error:
            raise kind(f"the tokenizer's process cannot be started ({error})") from None
        self._process = process
        self._pid = os.getpid()
        self._finish = weakref.finalize(self, end, process)
        answer = self._exchange(process, [self._added, self._data], kind)
        if answer[:1] != b"k":
            self._forget()
            raise kind(answer[1:].decode("utf-8", "replace"))
        return process

    def _exchange(
        self, process: subprocess.Popen[bytes], frames: list[bytes], kind: type[EngineError]
    ) -> bytes:
        """Send frames; return the answer to the last."""
        assert process.stdin is not None and process.stdout is not None
        answer = None
        try:
            with contextlib.suppress(BrokenPipeError):
                for frame in frames:
                    send(process.stdin, frame)
            answer = receive(process.stdout)
        finally:
            if answer is None:  # it died, or this thread was interrupted
                code = self._forget()
        if answer is None:
            raise kind(f"{self._step} of tokenizer.json {_reason(code)}")
        return answer

    def _forget(self) -> int | None:
        self._process = None
        return self._finish()


def _start() -> subprocess.Popen[bytes]:
    return start(_CODE, {**os.environ, "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"})


def _reason(code: int | None) -> str:
    if code == -signal.SIGPROF:
        return (
            f"takes more than its limit of CPU time ({TEXT_SECONDS:g} s, and "
            f"{SECONDS_PER_CHARACTER * 1e6:g} s for a million characters)"
        )
    return f"fails, or takes more than its limit of {MAX_MEMORY >> 30} GiB of memory (exit {code})"


def _fields_of(token: AddedToken) -> dict[str, Any]:
    names = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    return {name: getattr(token, name) for name in names}


def main() -> None:
    """Serve a parent until it closes the pipe."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = MAX_MEMORY if hard == resource.RLIM_INFINITY else min(MAX_MEMORY, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    source = sys.stdin.buffer
    sink = sys.stdout.buffer
    try:
        backend = _load(source)
    except EngineError as error:
        send(sink, b"e" + str(error).encode("utf-8", "replace"))
        return
    send(sink, b"k")
    while frame := receive(source):
        send(sink, _answer(backend, frame))


def _load(source: BinaryIO) -> tokenizers.Tokenizer:
    signal.setitimer(signal.ITIMER_PROF, LOAD_SECONDS)
    added = receive(source)
    data = receive(source)
    if added is None or data is None:
        sys.exit(1)
    backend = build_backend(parse(data), with_steps=True)
    with library_errors(ConfigError, "tokens cannot be added"):
        backend.add_tokens([AddedToken(**fields) for fields in json.loads(added)])
    signal.setitimer(signal.ITIMER_PROF, 0)
    return backend


def _answer(backend: tokenizers.Tokenizer, frame: bytes) -> bytes:
    text = frame[1:].decode("utf-8")
    signal.setitimer(signal.ITIMER_PROF, TEXT_SECONDS + SECONDS_PER_CHARACTER * len(text))
    try:
        ids, is_added = encode_here(backend, text, frame[:1] == b"1")
    except RequestError as error:
        return b"e" + str(error).encode("utf-8", "replace")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    if len(ids) > MAX_IDS:
        return b"e" + f"the text must have at most {MAX_IDS} tokens; got {len(ids)}".encode()
    return (b"k1" if is_added else b"k0") + array.array("I", ids).tobytes()
