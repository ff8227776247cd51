"""A request: the tokens of one sequence, how many of them are computed, and its KV blocks.

The token counts always satisfy

    num_committed_tokens <= num_computed_tokens <= num_tokens
    num_tokens = len(prompt) + len(output) + num_pending_tokens

A token is *computed* once its keys and values are in the cache or a step that will write them is
scheduled, and *committed* once that step has succeeded. *Pending* tokens were sampled by a step
whose result has not reached the host yet: they count in the sequence, but only the device knows
their ids. Without asynchronous scheduling each step is committed before the next is scheduled, so
no token is pending between two steps.

Drafts count as none of these: a step computes them after the last token, and when it is committed,
the accepted ones become known and computed. Until then the request is in no other step, because its
length is unknown.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import Any, NamedTuple, Protocol

from engine.drafts import Drafts
from engine.errors import ContractError

__all__ = [
    "FINISH_REASONS",
    "NO_SLOT",
    "PrefixKey",
    "Request",
    "RequestState",
    "RequestStatus",
    "StopRules",
    "finished_status",
]


class RequestStatus(enum.Enum):
    """State of a request, logged by value."""

    WAITING = "waiting"  # in the queue, holds no blocks
    RUNNING = "running"  # holds blocks, takes part in steps
    PREEMPTED = "preempted"  # back in the queue without blocks, to be recomputed
    SWAPPED = "swapped"  # back in the queue, blocks in host memory
    FINISHED_STOPPED = "stop"
    FINISHED_LENGTH = "length"
    FINISHED_ABORTED = "abort"
    FINISHED_ERROR = "error"

    @property
    def is_finished(self) -> bool:
        """Tell whether the request will get no more tokens."""
        return self in _FINISHED


_FINISHED = frozenset(s for s in RequestStatus if s.name.startswith("FINISHED"))

FINISH_REASONS: dict[str, RequestStatus] = {s.value: s for s in RequestStatus if s in _FINISHED}
"""API finish reason ("stop", "length", "abort", "error") -> status."""


def finished_status(reason: str) -> RequestStatus:
    """Return the status of a request that finished for `reason`.

    Raises
    ------
    ContractError
        If `reason` is not in `FINISH_REASONS`.
    """
    if reason not in FINISH_REASONS:
        raise ContractError(f"reason must be one of {list(FINISH_REASONS)}; got {reason!r}")
    return FINISH_REASONS[reason]


class StopRules(Protocol):
    """Sampling parameters that decide when a request ends."""

    @property
    def max_tokens(self) -> int | None:
        """Maximum tokens to generate; None = up to the model's maximum length."""

    @property
    def min_tokens(self) -> int:
        """Number of tokens before end-of-sequence or stop ids may end the request."""

    @property
    def ignore_eos(self) -> bool:
        """Whether to treat the model's end-of-sequence ids as ordinary tokens."""

    @property
    def stop_token_ids(self) -> Sequence[int] | None:
        """Additional ids that end the request."""


NO_SLOT = -1
"""Id that stands for no state slot."""


@dataclass(slots=True)
class RequestState:
    """The state slots of a request of a model with recurrent layers; see `cache/state_slots.py`.

    Attributes
    ----------
    slot : int
        Slot that the next step writes to, and reads unless there is a `source`; NO_SLOT while the
        state is on the host.
    source : int
        Snapshot that the next step reads instead; NO_SLOT: none.
    drafted : tuple of int
        While drafts are in flight: the slots written after each of their tokens, `slot` first.
    snapshots : list of (int, int)
        (number of tokens, slot) of each snapshot that is not in the prefix tree yet.
    wanted : list of int
        Numbers of prompt tokens after which to take one, ascending.
    host_slot : int
        Slot on the host, if the request is swapped out.
    is_new : bool
        Whether the next step does not just continue in the slot of the last one.
    """

    slot: int
    source: int = NO_SLOT
    drafted: tuple[int, ...] = ()
    snapshots: list[tuple[int, int]] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)
    host_slot: int = NO_SLOT
    is_new: bool = True

    @property
    def current(self) -> int:
        """Slot of the state after all computed tokens, which the next step reads."""
        return self.slot if self.source == NO_SLOT else self.source

    @property
    def held(self) -> list[int]:
        """All slots on the device that the request owns."""
        own = self.drafted or ((self.slot,) if self.slot != NO_SLOT else ())
        return [*own, *(slot for _, slot in self.snapshots)]


class PrefixKey(NamedTuple):
    """Key that must match, besides the token ids, for two requests to share a cached prefix.

    Attributes
    ----------
    cache_salt : str or None
    long_rope : bool
        Whether rope's long factors rotated the keys.
    adapter : int
        Serial of the LoRA adapter; 0 without one.
    epoch : int
        See `Request.prefix_epoch`.
    """

    cache_salt: str | None = None
    long_rope: bool = False
    adapter: int = 0
    epoch: int = 0


@dataclass(slots=True, eq=False)
class Request:
    """One sequence to continue: its only record, shared by all parts of the engine.

    The caller sets the constructor's arguments and reads the rest. Only the scheduler, including
    its queues and block manager, writes the state. Three attributes belong to other parts, which
    therefore need no request tables of their own: `stream` to the engine, `row` to the runner,
    `failed_at` to the recovery.

    Parameters
    ----------
    request_id : str
        Unique among unfinished requests.
    prompt_token_ids : list of int
        At least one id; must not be modified afterwards.
    sampling_params : StopRules
        Limits and stop rules; only the attributes of `StopRules` are read here.
    arrival_time : float
        Seconds of the monotonic clock, for metrics only; requests arrive in the order of
        `add_request` calls.
    priority : int
        Smaller values are served first.
    cache_salt : str, optional
        Cached prefixes are shared only among requests with the same salt.
    adapter : LoraAdapter, optional
        LoRA adapter that changes the model for this request; prefixes are shared only among
        requests with the same one.
    short_rope_len : int
        Longest sequence whose keys are rotated with longrope's short factors, in tokens; a longer
        one needs the long factors for all its keys. 0 if the factors do not depend on the length.
    reuse_prefix : bool
        False recomputes every prompt position (prompt_logprobs needs them all).
    eos_token_ids : iterable of int
        The model's end-of-sequence ids (ignored with `sampling_params.ignore_eos`).
    always_ends_at_eos : bool
        Whether end-of-sequence ids end it regardless of `ignore_eos` and `min_tokens`, because its
        grammar allows them only at the end.
    spec : SamplingSpec, optional
        Sampling specification for the runner; not used here.

    Attributes
    ----------
    state : RequestState or None
        Its state slots; None without blocks, or if the model has no recurrent layers.
    drafts : Drafts or None
        Latest proposal (`Scheduler.propose`), kept until a step that computes it is committed.
    num_draft_tokens : int
        Number of drafts in the step in flight, if any; otherwise 0.
    leader, siblings : Request or None, list of Request
        For parallel samples: the request that computes their common prompt, and the requests
        waiting for it.
    stream : OutputStream or None
        Output stream; None until `add_request` returns, and again after the request has ended.
    num_restarts : int
        Number of times it was requeued, after a preemption, a failed step or a change of rope
        factors; other requests may have used its blocks since.
    long_rope : bool
        Whether the keys in its blocks are rotated with the long factors.
    prefix_epoch : int
        Number of the last reset of the prefix cache that found it with blocks; 0 if none did.
        Requests share prefixes only within an epoch.
    pause_len : int
        Length at which it cannot simply be decoded further: `max_num_tokens`, or one token more
        than `short_rope_len` while its keys are rotated with the short factors.
    row : int
        Row in the runner's tables; -1 if none.
    failed_at : int
        Number of computed tokens it would have had after the step that failed; 0 if no step failed
        or it has advanced past that point.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> rules = SimpleNamespace(max_tokens=2, min_tokens=0, ignore_eos=False, stop_token_ids=None)
    >>> request = Request("r0", [5, 6, 7], rules, eos_token_ids=[2])
    >>> request.num_tokens, request.status.value
    (3, 'waiting')
    >>> request.append_tokens([2]), request.finish_reason
    (<RequestStatus.FINISHED_STOPPED: 'stop'>, None)
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: StopRules
    _: KW_ONLY
    arrival_time: float = 0.0
    priority: int = 0
    cache_salt: str | None = None
    adapter: Any = None
    short_rope_len: int = 0
    reuse_prefix: bool = True
    eos_token_ids: InitVar[Iterable[int]] = ()
    always_ends_at_eos: bool = False
    spec: Any = field(default=None, repr=False)

    # state: written by the scheduler
    status: RequestStatus = field(init=False, default=RequestStatus.WAITING)
    stop_reason: int | str | None = field(init=False, default=None)
    output_token_ids: list[int] = field(init=False, default_factory=list)
    block_table: list[int] = field(init=False, default_factory=list)
    host_block_table: list[int] = field(init=False, default_factory=list)
    num_tokens: int = field(init=False)
    num_pending_tokens: int = field(init=False, default=0)
    num_computed_tokens: int = field(init=False, default=0)
    num_committed_tokens: int = field(init=False, default=0)
    num_cached_tokens: int = field(init=False, default=0)
    num_preemptions: int = field(init=False, default=0)
    num_restarts: int = field(init=False, default=0)
    num_tree_blocks: int = field(init=False, default=0)
    num_skips: int = field(init=False, default=0)
    max_num_tokens: int = field(init=False, default=0)
    long_rope: bool = field(init=False, default=False)
    prefix_epoch: int = field(init=False, default=0)
    pause_len: int = field(init=False, default=0)
    order: tuple[int, int] = field(init=False, default=(0, 0))
    shares_last_block: bool = field(init=False, default=False)
    state: RequestState | None = field(init=False, default=None, repr=False)
    drafts: Drafts | None = field(init=False, default=None, repr=False)
    num_draft_tokens: int = field(init=False, default=0)
    leader: Request | None = field(init=False, default=None, repr=False)
    siblings: list[Request] = field(init=False, default_factory=list, repr=False)
    # written by the engine, the runner and the recovery
    stream: Any = field(init=False, default=None, repr=False)
    row: int = field(init=False, default=-1)
    failed_at: int = field(init=False, default=0)
    _eos: frozenset[int] = field(init=False)
    _ends: frozenset[int] = field(init=False)  # _eos plus the stop ids

    def __post_init__(self, eos_token_ids: Iterable[int]) -> None:
        rules = self.sampling_params
        ignores_eos = rules.ignore_eos and not self.always_ends_at_eos
        self._eos = frozenset() if ignores_eos else frozenset(eos_token_ids)
        self._ends = self._eos.union(rules.stop_token_ids or ())
        self.num_tokens = len(self.prompt_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """Number of prompt tokens."""
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Number of generated tokens known to the host."""
        return len(self.output_token_ids)

    @property
    def num_known_tokens(self) -> int:
        """Number of tokens whose ids the host knows: prompt and output, without pending ones."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def is_finished(self) -> bool:
        """Tell whether the request will get no more tokens."""
        return self.status in _FINISHED

    @property
    def finish_reason(self) -> str | None:
        """One of "stop", "length", "abort", "error"; None while unfinished."""
        return self.status.value if self.status in _FINISHED else None

    @property
    def prefix_key(self) -> PrefixKey:
        """Key of the request's prefixes.

        Without blocks, it is the key of those that its present length would be given.
        """
        holds_keys = self.block_table or self.host_block_table
        is_long = self.long_rope if holds_keys else self.needs_long_rope
        adapter = 0 if self.adapter is None else self.adapter.serial
        return PrefixKey(self.cache_salt, is_long, adapter, self.prefix_epoch)

    @property
    def needs_long_rope(self) -> bool:
        """Tell whether a sequence of its present length uses longrope's long factors."""
        return 0 < self.short_rope_len < self.num_tokens

    def choose_rope(self) -> None:
        """Choose the rope factors by the present length; called when it is given its blocks."""
        self.long_rope = self.needs_long_rope
        self.pause_len = self.max_num_tokens
        if self.short_rope_len and not self.long_rope:
            self.pause_len = min(self.pause_len, self.short_rope_len + 1)

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Return the known ids at positions [start, min(stop, num_known_tokens))."""
        num_prompt = len(self.prompt_token_ids)
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : stop - num_prompt]
        ids = self.prompt_token_ids[start:stop]
        if stop > num_prompt:
            ids += self.output_token_ids[: stop - num_prompt]
        return ids

    def drop_drafts(self) -> None:
        """Drop all drafts, including those in flight."""
        self.drafts = None
        self.num_draft_tokens = 0

    def append_tokens(self, token_ids: Sequence[int]) -> RequestStatus | None:
        """Append sampled ids up to the one that ends the request; return its final status.

        Each id resolves a pending token; if none is pending, the sequence grows. The caller sets
        `status`. This sets `stop_reason` if the request ends with a stop id other than an
        end-of-sequence id.
        """
        output = self.output_token_ids
        ends = self._ends
        limit = self.max_num_tokens
        for token_id in token_ids:
            output.append(token_id)
            if self.num_pending_tokens:
                self.num_pending_tokens -= 1
            else:
                self.num_tokens += 1
            if token_id in ends and (
                len(output) >= self.sampling_params.min_tokens
                or (self.always_ends_at_eos and token_id in self._eos)
            ):
                self.stop_reason = None if token_id in self._eos else token_id
                return RequestStatus.FINISHED_STOPPED
            if limit and len(self.prompt_token_ids) + len(output) >= limit:
                return RequestStatus.FINISHED_LENGTH
        return None
