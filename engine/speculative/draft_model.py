"""Drafts from a draft model: a smaller model with the same vocabulary.

Its own `ModelRunner` executes shadow requests: the same tokens, with block tables from
`DraftPages`. A proposal of k drafts is k steps launched back to back; the ids sampled by one step
stay on the device as input of the next.

Drafts are sampled with the request's own temperature, filters, seed and positions. The target's
sampler draws the same random numbers, so a draft is always accepted if the two models' logits are
equal. Penalties, biases and masks are not applied to drafts: they affect only the acceptance rate.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.cache.kv_cache import KVCache, KVGeometry
from engine.cache.memory_pool import MemoryPool
from engine.drafts import DeferredDrafts, DraftIds, Drafts
from engine.request import Request, RequestStatus
from engine.runner.model_runner import LaunchedStep, ModelRunner
from engine.runner.sampling import SamplingSpec
from engine.runner.transfer import DeviceToHostCopy
from engine.sampling_params import SamplingParams
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.output import ScheduledSequence, ScheduleOutput
from engine.speculative.costs import StepCosts, measure_propose_costs
from engine.speculative.draft_pages import DraftPages, SequencePages, num_spare_blocks

__all__ = ["DraftModelProposer"]

# Query tokens per request in the first step of a proposal: the last known token and, if all drafts
# were accepted, the last draft, whose KV is missing too.
_FIRST_LEN = 2


@dataclass(slots=True, eq=False)
class _Drafted:
    """The draft model's state of one request: its shadow, its pages, its last drafts."""

    request: Request
    shadow: Request
    pages: SequencePages
    index: int  # index of its group of spare blocks
    num_known: int = 0  # number of the request's known tokens at its last proposal
    drafts: Drafts | None = None  # last proposal; the pages hold the KV of all but its final draft
    num_wanted: int = 0  # number of drafts to propose now


class DraftModelProposer:
    """Proposes tokens sampled by a draft model.

    Missing KV is computed in chunks, one per call across all requests; a request gets no drafts
    until its KV is complete. Drafts end at an id outside the draft model's vocabulary.

    Parameters
    ----------
    model : RunnableModel
        The draft model; closed by `close`.
    vocab_size : int
        Vocabulary size of the target.
    pool : MemoryPool
        Memory pool of the target, on the same device.
    limits : SchedulerConfig
        Scheduler limits of the target.
    num_drafts : int
        Maximum number of drafts per request.
    generations : sequence of int
        `BlockAllocator.generations` of the target's blocks.

    Attributes
    ----------
    runner : ModelRunner
        The draft model's runner; deleted by `close`.
    """

    def __init__(
        self,
        model: Any,
        vocab_size: int,
        pool: MemoryPool,
        limits: SchedulerConfig,
        num_drafts: int,
        generations: Sequence[int],
    ) -> None:
        c = model.config
        size = limits.block_size
        self._model = model
        self._num_ids = min(vocab_size, c.vocab_size)  # ids known to both models
        self._token_budget = limits.max_num_batched_tokens
        self._num_blocks = limits.num_blocks
        self._num_spare = num_spare_blocks(size, num_drafts)
        num_blocks = limits.num_blocks + self._num_spare * limits.max_num_seqs
        geometry = KVGeometry.of_model(c, model.dtype, size)
        self.kv_cache = KVCache(geometry, num_blocks, pool, "draft kv")
        self._max_len = min(model.max_model_len, limits.max_model_len)
        self._max_blocks = -(-self._max_len // size)
        self.runner = ModelRunner(
            model, self.kv_cache, max_num_seqs=limits.max_num_seqs, max_model_len=self._max_len
        )
        self._generations = generations
        self._pages = DraftPages(size, generations)
        self._drafted: dict[Request, _Drafted] = {}  # least recently used first
        self._free = list(range(limits.max_num_seqs))
        self._num_steps = 0
        self._costs: StepCosts | None = None
        self._sampled = model.device.xp.zeros((limits.max_num_seqs, num_drafts), np.int32)
        self._ids = DraftIds(None, list)  # sampled ids of the last proposal

    def prepare(self, *, graphs: bool, progress: bool = False) -> None:
        """Capture graphs for the steps of a proposal, and measure its cost."""
        if graphs:
            self.capture_graphs(progress=progress)
        self._costs = measure_propose_costs(self.runner, len(self._free), self._num_blocks)

    def capture_graphs(self, *, progress: bool = False) -> None:
        """Capture graphs; on the CPU, steps run directly instead."""
        self.runner.capture_graphs(self._max_len, _FIRST_LEN - 1, progress=progress)
        assert self.runner.graphs is not None
        self._sampled[:1, 0] = self.runner.graphs.sampled_ids(1)
        self._collected(1)  # compiles CuPy's kernels now, not in the first proposal

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[Drafts | None]:
        """Return the drafts of each request; None if its KV is incomplete."""
        try:
            return self._propose(wanted)
        except BaseException:
            self._reset()
            raise

    def forget(self, request: Request) -> None:
        """Drop the state of a request; its computed blocks stay recorded."""
        drafted = self._drafted.pop(request, None)
        if drafted is not None:
            self.runner.release([drafted.shadow])
            self._free.append(drafted.index)

    def cost(self, num_sequences: int, num_tokens: int) -> float:
        """Return the time of a proposal in seconds, for sequences whose KV is complete."""
        if self._costs is None:
            return 0.0
        first = self._costs.seconds(num_sequences, _FIRST_LEN)
        return first + (num_tokens - 1) * self._costs.seconds(num_sequences, 1)

    def close(self) -> None:
        """Free the pages, and close the model; a second call does nothing."""
        if self.kv_cache.is_closed:
            return
        self._drafted = {}
        self.runner.detach()
        del self.runner  # it holds arrays of the model
        self.kv_cache.close()
        self._model.close()

    # ---- helpers of propose

    def _propose(self, wanted: Sequence[tuple[Request, int]]) -> list[Drafts | None]:
        all_drafted = self._drafted_of([request for request, _ in wanted])
        copies: list[tuple[int, int]] = []
        for drafted, (_, count) in zip(all_drafted, wanted, strict=True):
            copies += self._follow(drafted, count)
        if copies:
            self._launch(ScheduleOutput(self._num_steps, copies=copies))
        self.runner.drop_last_ids(drafted.shadow for drafted in all_drafted)
        ready = self._catch_up([drafted for drafted in all_drafted if drafted.num_wanted > 0])
        drafts = self._draft(ready)
        for drafted in ready:
            drafted.drafts = drafts[drafted]
            self._pages.computed(drafted.pages, drafted.num_known)
        return [drafts.get(drafted) for drafted in all_drafted]

    def _drafted_of(self, requests: Sequence[Request]) -> list[_Drafted]:
        """Return the state of each request; the least recently used are evicted for new ones."""
        for request in requests:
            if request in self._drafted:
                self._drafted[request] = self._drafted.pop(request)
        for request in requests:
            if request not in self._drafted:
                if not self._free:
                    self.forget(next(iter(self._drafted)))
                self._drafted[request] = self._new(request, self._free.pop())
        return [self._drafted[request] for request in requests]

    def _new(self, request: Request, index: int) -> _Drafted:
        spec = request.spec
        shadow = Request(
            request.request_id,
            request.prompt_token_ids,
            spec.params,
            spec=SamplingSpec(_plain(spec.params), spec.seed),
        )
        shadow.output_token_ids = request.output_token_ids  # shared, not copied: it grows
        shadow.status = RequestStatus.RUNNING
        shadow.max_num_tokens = request.max_num_tokens
        first = self._num_blocks + index * self._num_spare
        spare = list(range(first, first + self._num_spare))
        return _Drafted(request, shadow, SequencePages(spare), index)

    def _follow(self, drafted: _Drafted, count: int) -> list[tuple[int, int]]:
        """Adopt the request's changes since the last proposal; return the blocks to copy.

        Sets `num_wanted`: 0 if the request cannot get drafts now.
        """
        request = drafted.request
        pages = drafted.pages
        shadow = drafted.shadow
        known = request.num_known_tokens
        new_ids = request.token_ids(drafted.num_known, known)
        if drafted.drafts is not None:
            pages.num_valid += _num_equal(drafted.drafts.token_ids[:-1], new_ids)
        drafted.drafts = None
        drafted.num_wanted = 0
        if max(new_ids, default=0) >= self._num_ids:
            return []
        drafted.num_known = known
        is_long = 0 < self._model.short_rope_len < known
        if is_long != pages.long_rope:
            pages.rotate_anew(is_long)
            shadow.long_rope = is_long
            self.runner.release([shadow])  # its next row has the other factors
        copies = self._pages.follow(pages, request)
        if pages.is_rewritten:
            self.runner.release([shadow])  # its next row is filled with the whole table
            shadow.block_table = pages.table[: self._max_blocks]
            pages.is_rewritten = False
        room = min(len(shadow.block_table) * self.kv_cache.geometry.block_size, self._max_len)
        drafted.num_wanted = min(count, room + 1 - known)
        return copies

    def _catch_up(self, all_drafted: Sequence[_Drafted]) -> list[_Drafted]:
        """Compute a chunk of missing KV; return the requests that then lack at most two tokens."""
        sequences: list[ScheduledSequence] = []
        ready: list[_Drafted] = []
        left = self._token_budget
        size = self.kv_cache.geometry.block_size
        claimed: set[int] = set()
        for drafted in all_drafted:
            pages = drafted.pages
            shadow = drafted.shadow
            start = pages.num_valid
            stop = drafted.num_known - _FIRST_LEN
            count = max(0, min(stop - start, left))
            blocks = shadow.block_table[start // size : (start + count - 1) // size + 1]
            if count and claimed.isdisjoint(blocks):  # else another request computes their prefix
                claimed.update(blocks)
                left -= count
                sequences.append(ScheduledSequence(shadow, start, count, False, 0))
                self._pages.computed(pages, start + count)
            if pages.num_valid >= stop:
                ready.append(drafted)
        if sequences:
            self._launch(_step(self._num_steps, sequences, 0, 1))
        return ready

    def _draft(self, ready: Sequence[_Drafted]) -> Mapping[_Drafted, Drafts]:
        """Launch the steps that sample the drafts, and return the drafts."""
        self._ids.on_device = None  # overwritten from here on
        ready = sorted(ready, key=lambda drafted: -drafted.num_wanted)
        unread: list[tuple[list[_Drafted], LaunchedStep]] = []
        active: list[_Drafted] = []
        for number in range(ready[0].num_wanted if ready else 0):
            before = active
            active = [d for d in ready if d.num_wanted > number]
            step = self._next_step(active, number) if number else self._first_step(active)
            step.is_unchanged = number > 1 and len(active) == len(before)
            unread.append((active, self._launch(step)))
            if (graphs := self.runner.graphs) is not None:
                sampled = graphs.sampled_ids(len(active), step.query_len)
                self._sampled[: len(active), number] = sampled
        if self.runner.graphs is None:
            return self._read(ready, unread)
        return self._deferred(ready)

    def _deferred(self, ready: Sequence[_Drafted]) -> Mapping[_Drafted, Drafts]:
        """Return drafts whose ids are read from the device on demand."""
        if ready:
            self._ids = self._collected(len(ready))
        return {d: DeferredDrafts(self._ids, i, d.num_wanted) for i, d in enumerate(ready)}

    def _collected(self, count: int) -> DraftIds:
        """Return the sampled ids of the first `count` requests, and start their copy to the host.

        Ids are clamped to the common vocabulary on the device, so that host and device see the same
        drafts.
        """
        device = self._model.device
        ids = self._sampled[:count]
        device.xp.clip(ids, 0, self._num_ids - 1, out=ids)
        copy = DeviceToHostCopy(device, {"ids": ids if device.is_cuda else ids.copy()})
        return DraftIds(ids, lambda: copy.wait()["ids"].tolist())

    def _first_step(self, active: list[_Drafted]) -> ScheduleOutput:
        """Return the step over the last known tokens; with graphs, exactly two per request."""
        sequences = []
        for drafted in active:
            stop = drafted.num_known
            count = _FIRST_LEN
            if self.runner.graphs is None:
                count = stop - min(drafted.pages.num_valid, stop - 1)
            sequences.append(ScheduledSequence(drafted.shadow, stop - count, count, True, 0))
        if self.runner.graphs is not None:
            return _step(self._num_steps, sequences, len(sequences), _FIRST_LEN)
        sequences.sort(key=lambda s: s.num_scheduled_tokens)
        num_decodes = sum(s.num_scheduled_tokens == 1 for s in sequences)
        return _step(self._num_steps, sequences, num_decodes, 1)

    def _next_step(self, active: list[_Drafted], number: int) -> ScheduleOutput:
        """Return the step that reads draft `number` - 1, whose id exists only on the device."""
        sequences = [
            ScheduledSequence(d.shadow, d.num_known + number - 1, 1, True, 1) for d in active
        ]
        return _step(self._num_steps, sequences, len(sequences), 1)

    def _launch(self, step: ScheduleOutput) -> LaunchedStep:
        self._num_steps += 1
        return self.runner.launch(step)

    def _read(
        self, ready: Iterable[_Drafted], steps: Iterable[tuple[list[_Drafted], LaunchedStep]]
    ) -> Mapping[_Drafted, Drafts]:
        """Read back all steps; drafts end at a missing id or one outside the common vocabulary."""
        ids: dict[_Drafted, list[int]] = {drafted: [] for drafted in ready}
        for active, step in steps:
            result = self.runner.read(step)
            for drafted in active:
                ids[drafted] += result.token_ids.get(drafted.shadow, [self._num_ids])
        return {
            drafted: Drafts(tuple(itertools.takewhile(lambda i: i < self._num_ids, of_one)))
            for drafted, of_one in ids.items()
        }

    def _reset(self) -> None:
        """Drop all state after a failure."""
        for request in list(self._drafted):
            self.forget(request)
        self._pages = DraftPages(self.kv_cache.geometry.block_size, self._generations)
        self.runner.recover()


def _plain(params: SamplingParams) -> SamplingParams:
    """Return the parameters of the random draw alone: temperature and filters."""
    return SamplingParams(
        temperature=params.temperature, top_p=params.top_p, top_k=params.top_k, min_p=params.min_p
    )


def _num_equal(drafts: Sequence[int], token_ids: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    pairs = enumerate(zip(drafts, token_ids, strict=False))
    most = min(len(drafts), len(token_ids))
    return next((i for i, (draft, token) in pairs if draft != token), most)


def _step(
    step_id: int, sequences: list[ScheduledSequence], num_decodes: int, query_len: int
) -> ScheduleOutput:
    return ScheduleOutput(
        step_id,
        sequences,
        num_scheduled_tokens=sum(s.num_scheduled_tokens for s in sequences),
        num_decodes=num_decodes,
        query_len=query_len,
    )
