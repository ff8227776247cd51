"""The messages between engine process and API processes: one msgpack message per frame.

A request is identified by its *handle*, a number chosen by its API process. The outputs of one step
for all requests of an API process are sent as one `StepResult`, in which a decoded token takes two
integers.
"""

from __future__ import annotations

from typing import Any

import msgspec

from engine import errors
from engine.errors import EngineError
from engine.outputs import Logprob
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
    "Lost",
    "Piece",
    "Ready",
    "Refused",
    "StepResult",
    "decode_logprobs",
    "encode_logprobs",
    "error_of",
    "kind_of",
]

CLOSED = "the engine was closed"  # the reason when an engine is told to end
MAX_REASON = 4096  # maximum characters of an error's text
BEAT_SECONDS = 0.5  # longest interval between heartbeats, unless a step takes longer

Entries = list[dict[int, tuple[float, int | None]] | None]
"""For each token: id -> (log-probability, rank)."""


class _Message(msgspec.Struct, tag=True, array_like=True):
    pass


# ---- from an API process


class Hello(_Message):
    """The first message; the engine ignores clients with a wrong token."""

    token: str


class Add(_Message):
    """A request; `params` holds the fields of `SamplingParams` that differ from the defaults.

    `resumed` holds the tokens so far of a request that another engine had accepted; see
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


class Abort(_Message):
    """End a request; its last piece follows."""

    handle: int


class Drop(_Message):
    """End a request whose outputs nobody reads; nothing follows."""

    handle: int


class End(_Message):
    """End a continuation whose text has ended, with a stop string for example."""

    handle: int
    index: int
    reason: str


class Call(_Message):
    """Call `name` of the engine: "stats", "snapshot" or "reset_prefix_cache"; `Answer` follows."""

    number: int
    name: str


class Embed(_Message):
    """Compute embeddings; `Answer` follows."""

    number: int
    token_ids: list[list[int]]
    pooling: str
    normalize: bool


class Cancel(_Message):
    """Cancel a call: nobody waits for its answer."""

    number: int


# ---- from the engine


class Ready(_Message):
    """The answer to `Hello`, once the model is loaded.

    `num_blocks` is the number of blocks that may hold cached prefixes.
    """

    model: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    generation_config: dict[str, Any]
    step_timeout: float | None
    block_size: int = 16
    num_blocks: int = 0


class Continuation(_Message):
    """The news of one continuation since the last message."""

    index: int
    token_ids: list[int]
    logprobs: Entries | None
    finish_reason: str | None
    stop_reason: int | str | None


class Piece(_Message):
    """The news of one request that two integers cannot carry.

    That is its first or last output, log-probabilities, or several continuations.
    """

    handle: int
    continuations: list[Continuation]
    is_finished: bool
    num_cached_tokens: int
    first_scheduled_time: float | None
    first_token_time: float | None
    prompt_logprobs: Entries | None


class StepResult(_Message):
    """The outputs of a step: one token for each of `handles`, and `pieces`."""

    handles: list[int]
    token_ids: list[int]
    pieces: list[Piece]


class Refused(_Message):
    """A request that was not queued."""

    handle: int
    kind: str
    reason: str


class Lost(_Message):
    """Requests aborted because this API process did not read for too long."""

    handles: list[int]
    reason: str


class Answer(_Message):
    """The result of a call (with an empty `kind`), or the error that it raised."""

    number: int
    kind: str
    content: bytes


class Heartbeat(_Message):
    """The engine has finished a step, or is idle; sent at least every `BEAT_SECONDS`.

    The fields are its load: tokens yet to be computed, and unfinished requests.
    """

    num_waiting_tokens: int = 0
    num_requests: int = 0


class Ended(_Message):
    """The engine has ended, with the reason."""

    reason: str


FromClient = Hello | Add | Abort | Drop | End | Call | Embed | Cancel
FromEngine = StepResult | Ready | Refused | Lost | Answer | Heartbeat | Ended


def encode_logprobs(entries: Any) -> Entries | None:
    """Return log-probabilities as plain values, without text: the receiver detokenizes."""
    if entries is None:
        return None
    return [
        None if entry is None else {i: (p.logprob, p.rank) for i, p in entry.items()}
        for entry in entries
    ]


def decode_logprobs(entries: Entries) -> list[dict[int, Logprob] | None]:
    """Return the log-probabilities that `encode_logprobs` encoded, without text.

    Examples
    --------
    >>> decode_logprobs(encode_logprobs([None, {5: Logprob(-0.5, 1, "word")}]))
    [None, {5: Logprob(logprob=-0.5, rank=1, decoded_token=None)}]
    """
    return [
        None if entry is None else {i: Logprob(*pair) for i, pair in entry.items()}
        for entry in entries
    ]


def kind_of(error: BaseException) -> str:
    """Return the name of the error's class for `error_of`."""
    known = (type(error).__name__ in errors.__all__, isinstance(error, QueueFullError))
    return type(error).__name__ if any(known) else "EngineError"


def error_of(kind: str, reason: str) -> EngineError:
    """Rebuild an error of the other process.

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
