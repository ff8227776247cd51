"""Speculation in the engine: asks the proposer before a step, counts what the step accepted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine.drafts import Drafts
from engine.request import Request
from engine.scheduler.output import ScheduleOutput
from engine.scheduler.scheduler import Scheduler
from engine.speculative.config import SpeculativeConfig
from engine.speculative.controller import Controller
from engine.speculative.counts import DraftCounts, SpeculationStats
from engine.speculative.proposer import Proposer

__all__ = ["NoSpeculation", "Speculation"]

_log = logging.getLogger(__name__)

_MAX_FAILURES = 16  # in a row, after which the proposer is not asked again
_IDLE_STEPS = 4  # without drafts, after which steps overlap again
_NUM_PEEKED = 16  # requests looked at per step while steps overlap


class NoSpeculation:
    """Of an engine without a `speculative_config`: proposes nothing."""

    is_active = False

    def propose(self) -> None:
        """Do nothing."""

    def record(self, output: ScheduleOutput, token_ids: Mapping[Request, Sequence[int]]) -> None:
        """Do nothing."""

    def forget(self, request: Request) -> None:
        """Do nothing."""

    def stats(self) -> SpeculationStats:
        """Return counters of 0."""
        return SpeculationStats()

    def close(self) -> None:
        """Do nothing."""


class Speculation:
    """Proposes drafts for the requests that are decoded, as long as that pays.

    The next tokens can be proposed only when the last one is known. So while drafts are proposed,
    no step is in flight between two calls of `LLMEngine.step`; otherwise steps overlap.

    Parameters
    ----------
    config : SpeculativeConfig
    proposer : Proposer
    scheduler : Scheduler
    controller : Controller
    vocab_size : int
        Ids of drafts are below it.

    Attributes
    ----------
    is_active : bool
        Whether every step must be read back before the next is scheduled.
    """

    def __init__(
        self,
        config: SpeculativeConfig,
        proposer: Proposer,
        scheduler: Scheduler,
        controller: Controller,
        vocab_size: int,
    ) -> None:
        self.is_active = True
        self._most = min(config.num_tokens, scheduler.config.max_draft_tokens)
        self._max_decodes = (config.disable_by_batch_size or 2**31) - 1
        self._proposer = proposer
        self._scheduler = scheduler
        self._controller = controller
        self._vocab_size = vocab_size
        self._counts = DraftCounts(self._most)
        self._num_real: dict[Request, int] = {}  # drafts in flight, without those that only pad
        self._num_failures = 0  # in a row
        self._num_idle = 0
        self._num_peeks = 0

    def propose(self) -> None:
        """Propose drafts for the next step; called before it is scheduled."""
        self._controller.next_step()
        requests = self._scheduler.decoding_requests()
        if not 0 < len(requests) <= self._max_decodes or self._num_failures >= _MAX_FAILURES:
            self._rest(at_once=bool(requests))
            return
        if any(request.num_pending_tokens for request in requests):
            self.is_active = self._peek(requests)
            return
        chosen = self._choose(requests)
        if not chosen:
            self._rest()
            return
        self._num_idle = 0
        self.is_active = True
        for request, drafts in chosen.items():
            self._scheduler.propose(request, drafts.token_ids, drafts.parents)

    def record(self, output: ScheduleOutput, token_ids: Mapping[Request, Sequence[int]]) -> None:
        """Count the drafts of a step that was read back; before it is committed."""
        if not output.num_draft_tokens:
            return
        for sequence in output.sequences:
            request, drafts = sequence.request, sequence.drafts
            num_real = self._num_real.pop(request, 0)
            if drafts is None or not num_real or request not in token_ids:
                continue
            depths = drafts.prefix(num_real).depths
            deepest = max(depths)
            num_accepted = min(len(token_ids[request]) - 1, deepest)
            self._counts.add([depths.count(d + 1) for d in range(deepest)], num_accepted)
            self._controller.record(request, num_accepted, deepest)

    def forget(self, request: Request) -> None:
        """Drop what is kept for a request that has ended."""
        self._num_real.pop(request, None)
        self._controller.forget(request)
        self._guarded(lambda: self._proposer.forget(request))

    def stats(self) -> SpeculationStats:
        """Return the counters."""
        return self._counts.snapshot()

    def close(self) -> None:
        """Free what the proposer holds."""
        self._guarded(self._proposer.close)

    # ---- parts of propose

    def _rest(self, *, at_once: bool = False) -> None:
        """Note a step without drafts; after some of them, steps may overlap."""
        self._num_idle += 1
        self.is_active = self._num_idle < _IDLE_STEPS and not at_once

    def _peek(self, requests: Sequence[Request]) -> bool:
        """Tell whether drafts would pay in the step after the one in flight."""
        if not self._costs_nothing(len(requests)):
            return self._num_worth_asking(requests) > 0
        self._num_peeks += 1
        start = self._num_peeks * _NUM_PEEKED % len(requests)
        some = (*requests[start:], *requests[:start])[:_NUM_PEEKED]
        return bool(self._controller.choose(self._proposals(some, self._most), len(some)))

    def _choose(self, requests: Sequence[Request]) -> dict[Request, Drafts]:
        """Return the drafts to verify; those that pad a request to the length of a graph, too."""
        count = self._most
        if not self._costs_nothing(len(requests)):
            count = self._num_worth_asking(requests)
        proposals = self._proposals(requests, count) if count else []
        counts = self._controller.choose(proposals, len(requests))
        self._num_real = dict(counts)
        chosen = {r: drafts.prefix(counts[r]) for r, drafts in proposals if r in counts}
        if chosen and self._controller.needs_equal_lengths:
            length = self._controller.graph_len(max(counts.values()))
            return {r: _padded(chosen.get(r), length) for r in requests}
        return chosen

    def _proposals(self, requests: Sequence[Request], count: int) -> list[tuple[Request, Drafts]]:
        """Ask the proposer; what is no valid proposal is dropped."""
        wanted = [
            (request, min(count, request.max_num_tokens - request.num_known_tokens - 1))
            for request in requests
            if request.spec.params.use_speculation
        ]
        wanted = [(request, most) for request, most in wanted if most > 0]
        if not wanted:
            return []
        given = self._guarded(lambda: list(self._proposer.propose(wanted)))
        if given is None:
            return []
        if len(given) != len(wanted):
            self._note_failure(f"it returned {len(given)} proposals for {len(wanted)} requests")
            return []
        proposals, num_failures = [], self._counts.num_failures
        for (request, most), drafts in zip(wanted, given, strict=True):
            if drafts is None:
                continue
            if why := self._fault(drafts, most):
                self._note_failure(why)
            elif len(drafts):
                proposals.append((request, drafts))
        if num_failures == self._counts.num_failures:
            self._num_failures = 0
        return proposals

    def _fault(self, drafts: Any, most: int) -> str:
        """Return why these are no valid drafts; "" if they are."""
        if isinstance(drafts, Exception):
            return _reason(drafts)
        if not isinstance(drafts, Drafts):
            return f"it returned {type(drafts).__name__} in place of Drafts"
        if len(drafts) > most:
            return f"it returned {len(drafts)} drafts where at most {most} were wanted"
        if drafts.token_ids and max(drafts.token_ids) >= self._vocab_size:
            return f"it returned id {max(drafts.token_ids)}; the vocabulary has {self._vocab_size}"
        return ""

    def _costs_nothing(self, num_sequences: int) -> bool:
        return self._proposer.cost(num_sequences, 1) == 0.0

    def _num_worth_asking(self, requests: Sequence[Request]) -> int:
        costs = [self._proposer.cost(len(requests), 1 + i) for i in range(self._most)]
        return self._controller.num_worth_asking(requests, self._most, costs)

    def _guarded(self, call: Callable[[], Any]) -> Any:
        """Call the proposer; None if it fails, which must not harm a request."""
        try:
            return call()
        except Exception as error:
            self._note_failure(_reason(error))
            return None

    def _note_failure(self, why: str) -> None:
        self._counts.num_failures += 1
        self._num_failures += 1
        if self._counts.num_failures == 1:
            _log.warning("the proposer of drafts failed; its proposal is dropped: %s", why)
        elif self._num_failures == _MAX_FAILURES:
            _log.error("the proposer of drafts is not asked again: it failed too often: %s", why)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:400]


def _padded(drafts: Drafts | None, length: int) -> Drafts:
    """Return drafts of which the first are `drafts`, and the rest a chain that only pads."""
    drafts = drafts or Drafts(())
    if len(drafts) == length:
        return drafts
    missing = length - len(drafts)
    ids = (*drafts.token_ids, *[drafts.token_ids[-1] if len(drafts) else 0] * missing)
    if drafts.parents is None:
        return Drafts(ids)
    return Drafts(ids, (*drafts.parents, *range(len(drafts) - 1, length - 1)))
