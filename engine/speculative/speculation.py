"""Speculation in the engine: asks the proposer before a step, counts what the step accepted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.drafts import Drafts
from engine.request import Request
from engine.scheduler.output import ScheduleOutput
from engine.scheduler.scheduler import Scheduler
from engine.speculative.config import SpeculativeConfig
from engine.speculative.controller import Controller
from engine.speculative.counts import DraftCounts, SpeculationStats
from engine.speculative.guarded import GuardedProposer

__all__ = ["NoSpeculation", "Speculation"]

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
    proposer : GuardedProposer
    scheduler : Scheduler
    controller : Controller

    Attributes
    ----------
    is_active : bool
        Whether every step must be read back before the next is scheduled.
    """

    def __init__(
        self,
        config: SpeculativeConfig,
        proposer: GuardedProposer,
        scheduler: Scheduler,
        controller: Controller,
    ) -> None:
        self.is_active = True
        self._most = min(config.num_tokens, scheduler.config.max_draft_tokens)
        self._max_decodes = (config.disable_by_batch_size or 2**31) - 1
        self._proposer = proposer
        self._scheduler = scheduler
        self._controller = controller
        self._counts = DraftCounts(self._most)
        self._num_real: dict[Request, int] = {}  # drafts in flight, without those that only pad
        self._num_idle = 0
        self._num_peeks = 0

    def propose(self) -> None:
        """Propose drafts for the next step; called before it is scheduled."""
        self._controller.next_step()
        requests = self._scheduler.decoding_requests()
        if not 0 < len(requests) <= self._max_decodes or self._proposer.is_given_up:
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
            self._scheduler.propose(request, drafts)

    def record(self, output: ScheduleOutput, token_ids: Mapping[Request, Sequence[int]]) -> None:
        """Count the drafts of a step that was read back; before it is committed."""
        if not output.num_draft_tokens:
            return
        for sequence in output.sequences:
            request, drafts = sequence.request, sequence.drafts
            num_real = self._num_real.pop(request, 0)
            if drafts is None or not num_real or request not in token_ids:
                continue
            real = drafts.prefix(num_real)
            depths = real.depths
            deepest = max(depths)
            num_accepted = real.num_accepted(token_ids[request])
            self._counts.add([depths.count(d + 1) for d in range(deepest)], num_accepted)
            self._controller.record(request, num_accepted, deepest)

    def forget(self, request: Request) -> None:
        """Drop what is kept for a request that has ended."""
        self._num_real.pop(request, None)
        self._controller.forget(request)
        self._proposer.forget(request)

    def stats(self) -> SpeculationStats:
        """Return the counters."""
        return self._counts.snapshot(self._proposer.num_failures)

    def close(self) -> None:
        """Free what the proposer holds."""
        self._proposer.close()

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
        """Ask for at most `count` drafts for each request, fewer where it ends soon."""
        wanted = [
            (request, min(count, request.max_num_tokens - request.num_known_tokens - 1))
            for request in requests
            if request.spec.params.use_speculation
        ]
        return self._proposer.ask([(request, most) for request, most in wanted if most > 0])

    def _costs_nothing(self, num_sequences: int) -> bool:
        return self._proposer.cost(num_sequences, 1) == 0.0

    def _num_worth_asking(self, requests: Sequence[Request]) -> int:
        costs = [self._proposer.cost(len(requests), 1 + i) for i in range(self._most)]
        return self._controller.num_worth_asking(requests, self._most, costs)


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
