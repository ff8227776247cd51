"""Messages between the engine process and API processes, in msgpack.

A request is identified by its *handle*, a number chosen by its API process. After each step, all
outputs for an API process are sent as one `StepResult`, in which a decoded token takes two
integers.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

from engine import errors
from engine.errors import EngineError
from engine.model_files import excerpt
from engine.outputs import Logprob
from engine.sampling_params import SamplingDefaults
from engine.scheduler.admission import QueueFullError

__all__ = [
    "Abort",
    "Add",
    "Answer",
    "Call",
    "Cancel",
    "Continuation",
    "Drop",
    "Embed",
    "End",
    "Ended",
    "FromClient",
    "FromEngine",
    "Heartbeat",
    "Hello",
    "Lens",
    "Lost",
    "Piece",
    "Ready",
    "Refused",
    "StepResult",
    "decode",
    "decode_logprobs",
    "encode_logprobs",
    "error_of",
    "kind_of",
]

CLOSED = "the engine was closed"  # reason sent when an engine is shut down
MAX_REASON = 4096  # maximum characters of an error message
BEAT_SECONDS = 0.5  # maximum interval between heartbeats, unless a step takes longer

Entries = list[msgspec.Raw]
"""Per token: an `Entry`, decoded one by one, as decoding all at once could take a second."""

Entry = dict[int, tuple[float, int | None]] | None
"""id -> (log-probability, rank)."""


class _Message(msgspec.Struct, tag=True, array_like=True):
    pass


# ---- from an API process


class Hello(_Message):
    """A client's first message; the engine replies with `Ready`."""


class Add(_Message):
    """New request; `params` holds the non-default fields of `SamplingParams`.

    `resumed` holds the tokens that another engine has already generated for this request; see
    `LLMEngine.add_request`.
    """

    handle: int
    request_id: str
    token_ids: list[int]
    params: dict[str, Any]
    is_final_only: bool
    priority: int
    cache_salt: str | None
    timeout: float | None
    resumed: list[list[int] | None] | None = None
    adapter: str | None = None  # name of a LoRA adapter that the engine holds


class Abort(_Message):
    """Abort a request; the engine still sends its last piece."""

    handle: int


class Drop(_Message):
    """Abort a request that nobody reads; the engine sends nothing more for it."""

    handle: int


class End(_Message):
    """End a continuation that the client has finished, at a stop string for example."""

    handle: int
    index: int
    reason: str


class Call(_Message):
    """Call of a method without a message of its own; the engine replies with `Answer`.

    `name` is "stats", "snapshot", "reset_prefix_cache", "sleep", "wake_up" or "is_sleeping".
    """

    number: int
    name: str
    salt_prefix: str | None = None  # argument of "snapshot"
    level: int = 1  # argument of "sleep"


class Embed(_Message):
    """Compute embeddings; the engine replies with `Answer`."""

    number: int
    token_ids: list[list[int]]
    pooling: str | None
    normalize: bool


class Lens(_Message):
    """Compute a logit lens; the engine replies with `Answer`: the fields of `LogitLens`."""

    number: int
    token_ids: list[int]
    num_tokens: int
    top: int


class AddAdapter(_Message):
    """Read a LoRA adapter; the engine replies with `Answer` once it holds it."""

    number: int
    name: str
    path: str
    load_inplace: bool


class RemoveAdapter(_Message):
    """Forget a LoRA adapter; the engine replies with `Answer`."""

    number: int
    name: str


class UpdateWeights(_Message):
    """Write new weights over the model's; the engine replies with `Answer`: their names."""

    number: int
    path: str


class Cancel(_Message):
    """Cancel a call: nobody is waiting for its answer any more."""

    number: int


# ---- from the engine


class Ready(_Message):
    """Reply to `Hello`, once the model is loaded.

    `num_blocks` is the number of blocks that can hold cached prefixes.
    """

    model: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    sampling_defaults: SamplingDefaults
    step_timeout: float | None
    block_size: int = 16
    num_blocks: int = 0
    hidden_size: int = 0
    adapters: list[str] = []
    num_lens_layers: int = 0
    labels: list[str] = []


class Continuation(_Message):
    """Update of one continuation since the last message."""

    index: int
    token_ids: list[int]
    logprobs: Entries | None
    finish_reason: str | None
    stop_reason: int | str | None


class Piece(_Message):
    """Update of one request that does not fit into two integers.

    Sent for its first or last output, log-probabilities, or several continuations.
    """

    handle: int
    continuations: list[Continuation]
    is_finished: bool
    num_cached_tokens: int
    first_scheduled_time: float | None
    first_token_time: float | None
    prompt_logprobs: Entries | None


class StepResult(_Message):
    """Outputs of a step.

    `token_ids[i]` is the new token of request `handles[i]`; a request whose update is more than one
    token has a `Piece` instead.
    """

    handles: list[int]
    token_ids: list[int]
    pieces: list[Piece]


class Refused(_Message):
    """The engine did not queue a request."""

    handle: int
    kind: str
    reason: str


class Lost(_Message):
    """The engine aborted these requests because this API process stopped reading for too long."""

    handles: list[int]
    reason: str


class Answer(_Message):
    """Result of a call (with an empty `kind`), or the error that it raised."""

    number: int
    kind: str
    content: bytes


class Heartbeat(_Message):
    """The engine has finished a step or is idle; sent at least every `BEAT_SECONDS`.

    The fields are its load (tokens yet to be computed, and number of unfinished requests), the
    names of its LoRA adapters, and whether it sleeps.
    """

    num_waiting_tokens: int = 0
    num_requests: int = 0
    adapters: list[str] = []
    is_sleeping: bool = False


class Ended(_Message):
    """The engine has stopped, for the given reason."""

    reason: str


_Changes = AddAdapter | RemoveAdapter | UpdateWeights
FromClient = Hello | Add | Abort | Drop | End | Call | Embed | Lens | Cancel | _Changes
FromEngine = StepResult | Ready | Refused | Lost | Answer | Heartbeat | Ended


@cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)


def decode(data: bytes | msgspec.Raw, kind: Any = Any) -> Any:
    """Decode a message, or the content of an `Answer`, as a value of type `kind`.

    Raises
    ------
    EngineError
        Whatever `data` is: no msgpack, too deeply nested, not UTF-8, or of another type.

    Examples
    --------
    >>> decode(msgspec.msgpack.encode(Abort(7)), FromClient)
    Abort(handle=7)
    """
    try:
        return _decoder(kind).decode(data)
    except Exception as error:  # not only DecodeError: RecursionError and UnicodeDecodeError too
        reason = excerpt(error)
        size = memoryview(data).nbytes
        raise EngineError(f"a message of {size} bytes cannot be read: {reason}") from None


def encode_logprobs(entries: Any) -> Any:
    """Convert log-probabilities to plain values, without text: the receiver detokenizes.

    Returns
    -------
    list of Entry, or None
        The encoder writes it as `Entries`.
    """
    if entries is None:
        return None
    return [
        None if entry is None else {i: (p.logprob, p.rank) for i, p in entry.items()}
        for entry in entries
    ]


def decode_logprobs(entries: Entries) -> list[dict[int, Logprob] | None]:
    """Inverse of `encode_logprobs`; the log-probabilities have no text.

    Raises
    ------
    EngineError
        If an entry cannot be read.

    Examples
    --------
    >>> plain = encode_logprobs([None, {5: Logprob(-0.5, 1, "word")}])
    >>> decode_logprobs(decode(msgspec.msgpack.encode(plain), Entries))
    [None, {5: Logprob(logprob=-0.5, rank=1, decoded_token=None)}]
    """
    plain = [decode(entry, Entry) for entry in entries]
    return [
        None if entry is None else {i: Logprob(*pair) for i, pair in entry.items()}
        for entry in plain
    ]


def kind_of(error: BaseException) -> str:
    """Return the class name of an error, as `error_of` expects it."""
    known = (type(error).__name__ in errors.__all__, isinstance(error, QueueFullError))
    return type(error).__name__ if any(known) else "EngineError"


def error_of(kind: str, reason: str) -> EngineError:
    """Rebuild an error raised in the other process.

    Examples
    --------
    >>> error_of("RequestError", "top_p must be ...")
    RequestError('top_p must be ...')
    """
    if kind == "QueueFullError":
        return QueueFullError(reason)
    cls = getattr(errors, kind, None) if kind in errors.__all__ else None
    if isinstance(cls, type) and issubclass(cls, EngineError):
        return cls(reason)
    return EngineError(reason)
