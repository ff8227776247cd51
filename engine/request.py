"""A request: the tokens of one sequence, how many of them are computed, and its KV blocks.

The token counts obey, at every moment,

    num_committed_tokens <= num_computed_tokens <= num_tokens
    num_tokens = len(prompt) + len(output) + num_pending_tokens

A token is *computed* once its keys and values are in the cache or a step that will write them is
scheduled, and *committed* once that step has succeeded. *Pending* tokens were sampled by a step
whose result has not reached the host yet: they count in the sequence, but their ids are on the
device only. Without asynchronous scheduling each step is committed before the next is scheduled,
and no token is pending between two steps.

Drafts count as none of these: a step computes them after the last token, and the accepted ones
become known and computed when that step is committed. Until then the request is in no other step,
because its length is not known.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import Any, Protocol

from engine.drafts import Drafts
from engine.errors import ContractError

__all__ = ["FINISH_REASONS", "Request", "RequestStatus", "StopRules", "finished_status"]


class RequestStatus(enum.Enum):
    """State of a request; logs show the value."""

    WAITING = "waiting"  # in the queue, holds no blocks
    RUNNING = "running"  # holds blocks, takes part in steps
    PREEMPTED = "preempted"  # back in the queue without blocks, to be recomputed
    SWAPPED = "swapped"  # back in the queue, its blocks are in host memory
    FINISHED_STOPPED = "stop"
    FINISHED_LENGTH = "length"
    FINISHED_ABORTED = "abort"
    FINISHED_ERROR = "error"

    @property
    def is_finished(self) -> bool:
        """Tell whether no further token will come."""
        return self in _FINISHED


_FINISHED = frozenset(s for s in RequestStatus if s.name.startswith("FINISHED"))

FINISH_REASONS: dict[str, RequestStatus] = {s.value: s for s in RequestStatus if s in _FINISHED}
"""Finish reason in the API ("stop", "length", "abort", "error") -> status."""


def finished_status(reason: str) -> RequestStatus:
    """Return the status of a request that finished for this reason.

    Raises
    ------
    ContractError
        If `reason` is not in `FINISH_REASONS`.
    """
    if reason not in FINISH_REASONS:
        raise ContractError(f"reason must be one of {list(FINISH_REASONS)}; got {reason!r}")
    return FINISH_REASONS[reason]


class StopRules(Protocol):
    """The part of the sampling parameters that decides when a request ends."""

    @property
    def max_tokens(self) -> int | None:
        """Maximum tokens to generate; None = up to the model's maximum length."""

    @property
    def min_tokens(self) -> int:
        """Tokens to generate before an end-of-sequence or stop id ends the request."""

    @property
    def ignore_eos(self) -> bool:
        """Whether the model's end-of-sequence ids are ordinary tokens."""

    @property
    def stop_token_ids(self) -> Sequence[int] | None:
        """Additional ids that end the request."""


@dataclass(slots=True, eq=False)
class Request:
    """One sequence to be continued: its only record, shared by all parts of the engine.

    The caller sets the constructor's arguments and reads the rest. The scheduler, with its queues
    and its block manager, is the only writer of the state. Three attributes belong to other parts,
    which then need no tables of requests: `stream` to the engine, `row` to the runner, `failed_at`
    to the recovery.

    Parameters
    ----------
    request_id : str
        Unique among unfinished requests.
    prompt_token_ids : list of int
        At least one id; must not be changed afterwards.
    sampling_params : StopRules
        Limits and stop rules; only the attributes of `StopRules` are read here.
    arrival_time : float
        Seconds on the monotonic clock, for metrics only; the order of arrival is that of the calls
        of `add_request`.
    priority : int
        Smaller is served earlier.
    cache_salt : str, optional
        Cached prefixes are shared only among requests of the same salt.
    long_rope : bool
        Whether the long rope factors are used; keys computed with other factors are not shared.
    reuse_prefix : bool
        False recomputes every prompt position (prompt_logprobs needs all of them).
    eos_token_ids : iterable of int
        The model's end-of-sequence ids (ignored when `sampling_params.ignore_eos`).
    always_ends_at_eos : bool
        Whether end-of-sequence ids end it regardless of `ignore_eos` and `min_tokens`: its grammar
        allows them only at the end.
    spec : SamplingSpec, optional
        Sampling of the request, for the runner; not used here.

    Attributes
    ----------
    drafts : Drafts or None
        The last proposal (`Scheduler.propose`), until a step that computes it is committed.
    num_draft_tokens : int
        Drafts in the step in flight; 0 if there is no such step.
    leader, siblings : Request or None, list of Request
        For parallel samples: the request that computes their common prompt, and the requests that
        wait for it.
    stream : OutputStream or None
        Its output stream; None until `add_request` returns, and after the request has ended.
    num_restarts : int
        Times it was queued again, after a preemption or a failed step; other requests may have used
        its blocks since.
    row : int
        Its row in the runner's tables; -1: none.
    failed_at : int
        Number of computed tokens it would have reached in a step that failed; 0 once it has
        advanced past that, or without a failed step.

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
    long_rope: bool = False
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
    order: tuple[int, int] = field(init=False, default=(0, 0))
    shares_last_block: bool = field(init=False, default=False)
    drafts: Drafts | None = field(init=False, default=None, repr=False)
    num_draft_tokens: int = field(init=False, default=0)
    leader: Request | None = field(init=False, default=None, repr=False)
    siblings: list[Request] = field(init=False, default_factory=list, repr=False)
    # written by the engine, the runner and the recovery
    stream: Any = field(init=False, default=None, repr=False)
    row: int = field(init=False, default=-1)
    failed_at: int = field(init=False, default=0)
    _eos: frozenset[int] = field(init=False)
    _ends: frozenset[int] = field(init=False)  # _eos and the stop ids

    def __post_init__(self, eos_token_ids: Iterable[int]) -> None:
        rules = self.sampling_params
        ignores_eos = rules.ignore_eos and not self.always_ends_at_eos
        self._eos = frozenset() if ignores_eos else frozenset(eos_token_ids)
        self._ends = self._eos.union(rules.stop_token_ids or ())
        self.num_tokens = len(self.prompt_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated and known on the host."""
        return len(self.output_token_ids)

    @property
    def num_known_tokens(self) -> int:
        """Tokens whose ids the host knows: prompt and output, without pending ones."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def is_finished(self) -> bool:
        """Tell whether no further token will come."""
        return self.status in _FINISHED

    @property
    def finish_reason(self) -> str | None:
        """One of "stop", "length", "abort", "error"; None while unfinished."""
        return self.status.value if self.status in _FINISHED else None

    @property
    def prefix_key(self) -> tuple[str | None, bool]:
        """Key that two requests must have in common, besides the ids, to share a cached prefix."""
        return self.cache_salt, self.long_rope

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Return the known ids of positions [start, min(stop, num_known_tokens))."""
        num_prompt = len(self.prompt_token_ids)
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : stop - num_prompt]
        ids = self.prompt_token_ids[start:stop]
        if stop > num_prompt:
            ids += self.output_token_ids[: stop - num_prompt]
        return ids

    def drop_drafts(self) -> None:
        """Drop the drafts, including those in flight."""
        self.drafts = None
        self.num_draft_tokens = 0

    def append_tokens(self, token_ids: Sequence[int]) -> RequestStatus | None:
        """Append sampled ids up to the first that ends the request; return the final status if any.

        Each id resolves a pending token; without one, the sequence grows. The caller sets `status`.
        `stop_reason` is set here if the request ends with a stop id that is not an end-of-sequence
        id.
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
