"""Encoding in a `Worker`, for tokenizers with steps not known to be harmless.

See `known_steps`. The tokenizers library cannot be interrupted: a normalizer that doubles its text
forty times, or a regular expression that backtracks, would hang or abort the caller. In the worker
the kernel limits the memory, and the CPU time per text. A text that exceeds a limit ends the worker
and fails with `RequestError`; the next text starts a new one.
"""

from __future__ import annotations

import array
import contextlib
import functools
import json
import os
import signal
from collections.abc import Callable, Collection, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken

from engine.errors import ConfigError, EngineError, RequestError
from engine.text.child_process import Worker, WorkerEndedError, incoming, reply, set_limits
from engine.text.control_tokens import Spans, TwinEncoder
from engine.text.library_errors import library_errors
from engine.text.tokenizer_json import build_backend, parse

__all__ = ["WorkerEncoder", "encode_here", "main"]

MAX_MEMORY = 2 << 30  # bytes of address space of the worker
LOAD_SECONDS = 20.0  # CPU time to load tokenizer.json; a 64 MiB file takes 5 s
TEXT_SECONDS = 5.0  # CPU time per text,
SECONDS_PER_CHARACTER = 1e-5  # plus this per character: ten times the cost of BPE
MAX_IDS = 1 << 24  # maximum ids per text
_LONG_TEXT = 4096  # characters; BPE takes a few milliseconds for that many

_PROBE = "".join(map(chr, range(32, 127))) + "\n\t é中"
_MAX_ANSWER_BYTES = 4 * MAX_IDS + 4096
_ENV = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}


def encode_here(
    backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool, pair: str | None = None
) -> tuple[list[int], bool]:
    """Encode in this process.

    Parameters
    ----------
    backend : Tokenizer
    text : str
    add_special_tokens : bool
    pair : str, optional
        A second text, which the post-processor puts behind the first.

    Returns
    -------
    ids : list of int
    is_added : bool
        If the first two ids are equal: whether the post-processor added the first. Else False.

    Raises
    ------
    RequestError
        If the library fails.
    """
    with library_errors(RequestError, "the text cannot be encoded"):
        if len(text) > _LONG_TEXT or os.environ.get("TOKENIZERS_PARALLELISM") == "false":
            # The batch call releases the GIL, which a server's other streams need, and computes no
            # offsets. Short texts avoid it: the library may start a thread per core.
            both = [text if pair is None else (text, pair)]
            [encoding] = backend.encode_batch_fast(both, add_special_tokens=add_special_tokens)
        else:
            encoding = backend.encode(text, pair, add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        # The mask is 1 for tokens the post-processor added, 0 for tokens of the text.
        is_added = len(ids) > 1 and ids[0] == ids[1] and bool(encoding.special_tokens_mask[0])
    return ids, is_added


class WorkerEncoder:
    """Encodes in a child process.

    Parameters
    ----------
    data : bytes
        Content of ``tokenizer.json``.
    added : sequence of AddedToken
        Tokens to add to the file's.
    step : str
        Name of the step not known to be harmless, for messages.
    splits_special : bool
        Whether special tokens in a text are text.

    Raises
    ------
    ConfigError
        If the child cannot load the file, or a short text exceeds its limits.
    """

    def __init__(
        self, data: bytes, added: Sequence[AddedToken], step: str, splits_special: bool = False
    ) -> None:
        fields = json.dumps([splits_special, list(map(_fields_of, added))]).encode()
        self._step = step
        self._worker = Worker(
            "from engine.text.encode_worker import main; main()",
            _MAX_ANSWER_BYTES,
            env=_ENV,
            setup=(fields + b"\n" + data, LOAD_SECONDS),
        )
        self._ask("", True, ConfigError)
        with contextlib.suppress(RequestError):  # other texts may still work
            self._ask(_PROBE, True, ConfigError)

    def __call__(
        self, text: str, add_special_tokens: bool, pair: str | None = None
    ) -> tuple[list[int], bool]:
        """Encode `text`, or a pair of texts; see `encode_here`.

        Raises
        ------
        RequestError
            If the library fails, or exceeds the limits on time, memory or ids.
        """
        around = b"" if pair is None else str(len(text)).encode()
        return self._ask(text + (pair or ""), add_special_tokens, RequestError, around)

    def encode_spans(
        self, text: str, add_special_tokens: bool, spans: Spans, tokens: Collection[str]
    ) -> tuple[list[int], bool]:
        """Encode `text`, of which only `spans` are control tokens; see `TwinEncoder`.

        Raises
        ------
        RequestError
            As `__call__`.
        """
        around = json.dumps([list(spans), sorted(tokens)]).encode()
        return self._ask(text, add_special_tokens, RequestError, around)

    def _ask(
        self, text: str, add_special_tokens: bool, kind: type[EngineError], around: bytes = b""
    ) -> tuple[list[int], bool]:
        request = (b"1" if add_special_tokens else b"0") + around + b"\n" + text.encode("utf-8")
        seconds = TEXT_SECONDS + SECONDS_PER_CHARACTER * len(text)
        try:
            # One try: the system may have killed the child for this text's memory use.
            answer = self._worker.ask(request, seconds, tries=1)
        except WorkerEndedError as error:
            raise kind(f"{self._step} of tokenizer.json {_reason(error.code)}") from None
        except OSError as error:
            raise kind(f"the tokenizer's process cannot be started ({error})") from None
        if answer[:1] == b"e":
            raise (kind if not text else RequestError)(answer[1:].decode("utf-8", "replace"))
        ids = array.array("I")
        if answer[:1] != b"k" or (len(answer) - 2) % ids.itemsize:
            raise kind(f"{self._step} of tokenizer.json fails: its process answers with no tokens")
        ids.frombytes(answer[2:])
        return ids.tolist(), answer[1:2] == b"1"


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


# ---- in the worker's process


def main() -> None:
    """Load the tokenizer, sent as the first request, and encode the texts that follow."""
    set_limits(MAX_MEMORY)
    texts = incoming()
    answer = _load(next(texts))
    for text in texts:
        reply(answer(text))


def _load(setup: bytes) -> Callable[[bytes], bytes]:
    """Return a function that encodes a text, or one that reports why loading failed."""
    fields, _, data = setup.partition(b"\n")
    try:
        backend = build_backend(parse(data), with_steps=True)
        with library_errors(ConfigError, "tokens cannot be added"):
            splits_special, added = json.loads(fields)
            backend.add_tokens([AddedToken(**token) for token in added])
            backend.encode_special_tokens = splits_special
    except EngineError as error:
        reason = _failed(str(error))
        return lambda _: reason
    twin = functools.lru_cache(maxsize=4)(functools.partial(TwinEncoder, backend))
    return lambda request: _encoded(backend, twin, request)


def _encoded(
    backend: tokenizers.Tokenizer,
    twin: Callable[[frozenset[str]], TwinEncoder],
    request: bytes,
) -> bytes:
    around, _, data = request[1:].partition(b"\n")
    text = data.decode("utf-8")
    adds = request[:1] == b"1"
    try:
        if around.isdigit():  # characters of the first of two texts
            end = int(around)
            ids, is_added = encode_here(backend, text[:end], adds, text[end:])
        elif around:
            spans, tokens = json.loads(around)
            ids, is_added = twin(frozenset(tokens))(text, adds, spans)
        else:
            ids, is_added = encode_here(backend, text, adds)
    except RequestError as error:
        return _failed(str(error))
    if len(ids) > MAX_IDS:
        return _failed(f"the text must have at most {MAX_IDS} tokens; got {len(ids)}")
    return (b"k1" if is_added else b"k0") + array.array("I", ids).tobytes()


def _failed(reason: str) -> bytes:
    return b"e" + reason.encode("utf-8", "replace")
