"""`Speculation`: requests drafts before a step, and counts the accepted ones after it."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from engine.drafts import MAX_QUERY_LEN, Drafts
from engine.request import Request
from engine.scheduler.output import ScheduleOutput
from engine.scheduler.scheduler import Scheduler
from engine.speculative.config import SpeculativeConfig
from engine.speculative.controller import Controller
from engine.speculative.counts import DraftCounts, SpeculationStats
from engine.speculative.forced import ForcedTokens
from engine.speculative.guarded import GuardedProposer

__all__ = ["NoSpeculation", "Speculation"]

_PATIENCE = 2  # consecutive steps without drafts before attempts pause
_LONGEST_WAIT = 16  # maximum number of steps between two attempts
_NUM_PEEKED = 16  # number of requests examined per step while steps overlap


class _Result(NamedTuple):
    """The read-back result of a step with drafts."""

    output: ScheduleOutput
    token_ids: Mapping[Request, Sequence[int]]
    num_real: Mapping[Request, int]  # number of drafts that are not padding
    certain: Collection[Request]  # requests whose drafts are forced


class NoSpeculation:
    """Stands in for `Speculation` without a `speculative_config`: proposes nothing."""

    is_active = False

    def propose(self, excluded: Collection[Request] = ()) -> None:
        """Do nothing."""

    def read_ahead(self, admitted: Sequence[Request]) -> None:
        """Do nothing."""

    def record(self, output: ScheduleOutput, token_ids: Mapping[Request, Sequence[int]]) -> None:
        """Do nothing."""

    def learn(self) -> None:
        """Do nothing."""

    def forget(self, request: Request) -> None:
        """Do nothing."""

    def stats(self) -> SpeculationStats:
        """Return counters of zero."""
        return SpeculationStats()

    def close(self) -> None:
        """Do nothing."""


class Speculation:
    """Proposes drafts for the decoding requests, as long as they pay.

    Drafts can be proposed only once the last token is known. So while drafts are proposed, no step
    is in flight between two calls of `LLMEngine.step`; otherwise steps overlap. In a pipeline they
    always do: each step has only requests whose last token is known.

    Parameters
    ----------
    config : SpeculativeConfig
        Options of speculative decoding.
    proposer : GuardedProposer
        The proposer of the configured method.
    scheduler : Scheduler
        Scheduler of the engine.
    controller : Controller
        Chooses the number of drafts.
    overlaps : bool
        Whether a step is scheduled before the previous one is read back.
    is_pipelined : bool
        Whether drafts are proposed while steps of other requests are in flight.

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
        *,
        overlaps: bool,
        is_pipelined: bool,
    ) -> None:
        self.is_active = not is_pipelined
        self._is_pipelined = is_pipelined
        # Whether drafts keep the next step from overlapping this one.
        self._overlaps = overlaps and not is_pipelined
        self._forced = GuardedProposer(ForcedTokens(), proposer.vocab_size)
        self._most = min(config.num_tokens, scheduler.config.max_draft_tokens)
        self._max_decodes = (config.disable_by_batch_size or 2**31) - 1
        self._proposer = proposer
        self._scheduler = scheduler
        self._controller = controller
        self._counts = DraftCounts(self._most)
        self._num_real: dict[Request, int] = {}  # drafts in flight that are not padding
        self._certain: set[Request] = set()  # requests whose drafts in flight are forced
        self._results: list[_Result] = []  # read back, but not counted yet
        self._num_futile = 0  # number of consecutive attempts without a verified draft
        self._num_waits = 0  # number of steps until the next attempt
        self._num_peeks = 0
        # Time at which the last step with drafts was read back; 0.0 once the next is launched.
        self._read_at = 0.0
        self._num_read = 0  # sequences of that step

    def propose(self, excluded: Collection[Request] = ()) -> None:
        """Propose drafts for the next step, which is then scheduled without `excluded`."""
        self._controller.next_step()
        requests = self._scheduler.decoding_requests()
        if self._num_waits or not 0 < len(requests) <= self._max_decodes:
            self._num_waits = max(0, self._num_waits - 1)
            self.is_active = False
            return
        if excluded and not (requests := [r for r in requests if r not in excluded]):
            return
        if any([request.num_pending_tokens for request in requests]):
            self.is_active = self._peek(requests)
            return
        count = self._num_to_ask(requests)
        chosen = self._choose(requests, count)
        if not chosen:
            has_cost = self._overlaps or (count > 0 and not self._is_free(len(requests)))
            self._note_futile(has_cost=has_cost)
            return
        self._num_futile = 0
        self.is_active = not self._is_pipelined
        for request, drafts in chosen.items():
            self._scheduler.propose(request, drafts)

    def read_ahead(self, admitted: Sequence[Request]) -> None:
        """Let the proposer read the prompts that the step just launched has begun to compute."""
        if self._read_at:
            self._note_wait(time.perf_counter() - self._read_at)
            self._read_at = 0.0
        if admitted:
            self._proposer.read_ahead([r for r in admitted if _wants_drafts(r)])

    def record(self, output: ScheduleOutput, token_ids: Mapping[Request, Sequence[int]]) -> None:
        """Keep the result of a step for `learn`; called between its read-back and its commit."""
        if not output.num_draft_tokens:
            return
        self._read_at = time.perf_counter()
        self._num_read = len(output.sequences)
        num_real = {s.request: self._num_real.pop(s.request, 0) for s in output.sequences}
        # A copy, because the commit truncates the tokens of requests that end.
        self._results.append(_Result(output, dict(token_ids), num_real, self._certain))

    def learn(self) -> None:
        """Count the drafts of the steps read back; called while the device runs the next step."""
        results = self._results
        self._results = []
        for result in results:
            for sequence in result.output.sequences:
                request = sequence.request
                drafts = sequence.drafts
                num_real = result.num_real.get(request, 0)
                if drafts is None or not num_real or request not in result.token_ids:
                    continue
                real = drafts.prefix(num_real)
                depths = real.depths
                deepest = max(depths)
                num_accepted = real.num_accepted(result.token_ids[request])
                self._counts.add([depths.count(d + 1) for d in range(deepest)], num_accepted)
                if request not in result.certain:
                    self._controller.record(request, num_accepted, deepest)

    def forget(self, request: Request) -> None:
        """Drop the state of a request that has ended."""
        self.learn()
        self._num_real.pop(request, None)
        self._certain.discard(request)
        self._controller.forget(request)
        self._proposer.forget(request)

    def stats(self) -> SpeculationStats:
        """Return the counters."""
        return self._counts.snapshot(self._proposer.num_failures + self._forced.num_failures)

    def close(self) -> None:
        """Close the proposer."""
        self._proposer.close()

    def _note_wait(self, seconds: float) -> None:
        """Record the device's idle time, if a step without drafts would have overlapped it."""
        if self._overlaps and self._is_free(self._num_read):
            self._controller.note_host_seconds(seconds)

    # ---- helpers of propose

    def _note_futile(self, *, has_cost: bool) -> None:
        """Record an attempt without drafts; repeated ones lengthen the wait until the next.

        `has_cost`: whether an attempt costs proposer time, or overlap between steps.
        """
        self._num_futile += 1
        if has_cost and self._num_futile > _PATIENCE:
            self._num_waits = min(2 ** (self._num_futile - _PATIENCE), _LONGEST_WAIT)
            self.is_active = False

    def _peek(self, requests: Sequence[Request]) -> bool:
        """Tell whether drafts would pay in the step after the one in flight."""
        count = self._num_to_ask(requests)
        is_free = self._is_free(len(requests))
        if count and not is_free:
            return True
        self._num_peeks += 1
        start = self._num_peeks * _NUM_PEEKED % len(requests)
        some = (*requests[start:], *requests[:start])[:_NUM_PEEKED]
        proposals = self._ask_all(some, count)
        return self._controller.would_pay(
            proposals, len(some), len(requests), certain=self._certain
        )

    def _choose(self, requests: Sequence[Request], count: int) -> dict[Request, Drafts]:
        """Return the drafts to verify, padded to a graph's length if steps are CUDA graphs."""
        proposals = self._ask_all(requests, count)
        needs_equal = self._controller.needs_equal_lengths
        room = MAX_QUERY_LEN
        if needs_equal:
            room = self._scheduler.config.max_model_len
            room -= max([request.num_known_tokens for request in requests])
            if not all([_may_be_padded(request) for request in requests]):
                return {}
        counts = self._controller.choose(proposals, len(requests), certain=self._certain, room=room)
        for request in requests:
            self._num_real.pop(request, None)
        self._num_real.update(counts)
        chosen = {r: drafts.prefix(counts[r]) for r, drafts in proposals if r in counts}
        if not chosen or not needs_equal:
            return chosen
        length = self._controller.graph_len(max(counts.values()))
        for request, drafts in chosen.items():
            if len(drafts) < length:
                chosen[request] = _padded(drafts, length)
        if len(chosen) < len(requests):
            return dict.fromkeys(requests, Drafts((0,) * length)) | chosen
        return chosen

    def _ask_all(self, requests: Sequence[Request], count: int) -> list[tuple[Request, Drafts]]:
        """Return the tokens that grammars force, and up to `count` drafts of the other requests."""
        wanted: list[tuple[Request, int]] = []
        with_grammar: list[tuple[Request, int]] = []
        for request in requests:
            most = min(self._most, request.max_num_tokens - request.num_known_tokens - 1)
            if most > 0 and _wants_drafts(request):
                wanted.append((request, min(count, most)))
                if request.spec.grammar is not None:
                    with_grammar.append((request, most))
        proposals = self._forced.ask(with_grammar)
        certain = {request for request, _ in proposals}
        self._certain = self._certain.difference(requests) | certain
        if count:
            if certain:
                wanted = [each for each in wanted if each[0] not in certain]
            proposals += self._proposer.ask(wanted)
        return proposals

    def _is_free(self, num_sequences: int) -> bool:
        return self._proposer.cost(num_sequences, 1) == 0.0

    def _num_to_ask(self, requests: Sequence[Request]) -> int:
        """Return the number of drafts to request from the proposer."""
        if self._proposer.is_given_up:
            return 0
        if self._is_free(len(requests)):
            return self._most
        cost = partial(self._proposer.cost, len(requests))
        asked = [request for request in requests if _wants_drafts(request)]
        return self._controller.num_worth_asking(asked, self._most, len(requests), cost)


def _wants_drafts(request: Request) -> bool:
    wants: bool = request.spec.params.use_speculation
    return wants


def _may_be_padded(request: Request) -> bool:
    """Tell whether padding has no effect on the request: a logits processor would see it."""
    return _wants_drafts(request) or not request.spec.params.logits_processors


def _padded(drafts: Drafts, length: int) -> Drafts:
    """Return `drafts` followed by a chain of padding, `length` in total."""
    ids = (*drafts.token_ids, *drafts.token_ids[-1:] * (length - len(drafts)))
    if drafts.parents is None:
        return Drafts(ids)
    return Drafts(ids, (*drafts.parents, *range(len(drafts) - 1, length - 1)))
