"""Drafts from a head on the target's hidden states (EAGLE-3, MTP).

The target's runner passes the features of every step to `HeadProposer`, which keeps those of a
request's last step: a proposal continues from the tokens that step accepted. So the keys of prompt
tokens are computed in the step itself. In a single process features are overwritten by the next
step, and a request that was not in the last one gets no drafts; in a pipeline they last.

Drafts are sampled with the request's own temperature, filters, seed and positions, restricted to
the head's vocabulary. The target's sampler draws the same random numbers. Penalties, biases and
masks are not applied to drafts: they affect only the acceptance rate. The ids stay on the device
until they are needed (`DeferredDrafts`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from engine import kernels
from engine.cache.kv_cache import KVCache, KVGeometry
from engine.drafts import DeferredDrafts, DraftIds, Drafts
from engine.dtypes import np_dtype
from engine.layers.batch import ForwardBatch
from engine.layers.sampler import Sampler, SamplingBatch
from engine.models.draft_heads import DraftHead
from engine.request import Request, RequestStatus
from engine.runner.features import Features, FeatureTap
from engine.runner.transfer import DeviceToHostCopy
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.output import ScheduleOutput
from engine.speculative.costs import StepCosts
from engine.speculative.draft_pages import num_spare_blocks
from engine.speculative.head_pages import HeadPages, HeadSequence

__all__ = ["HeadProposer"]

_SIZES = (1, 8, 64)  # batch sizes at which the cost is measured, in sequences
_CALLS = 3  # timed calls per size
_TINY = float(np.finfo(np.float32).tiny)  # top_p must stay above 0


class _Rows(NamedTuple):
    """Rows of one request in `features`: positions [start, stop), beginning at row `first`."""

    features: Features
    first: int
    start: int
    stop: int


@dataclass(frozen=True)
class _Work:
    """Positions [start, stop) of one request whose keys are to be computed."""

    request: Request
    start: int
    stop: int
    first_key: int  # index of the first key in the sequence's blocks
    features: Features
    first_row: int  # row of the features at position `start`


class HeadProposer:
    """Proposes a chain of drafts: the head runs once per draft, each time on its own output.

    Parameters
    ----------
    head : DraftHead
        The head and its weights.
    runner : ModelRunner
        Runner of the target, built with the head's `feature_layers`; its `features.on_step` is set.
    limits : SchedulerConfig
        Scheduler limits of the target.
    num_drafts : int
        Maximum number of drafts per request.
    generations : sequence of int
        `BlockAllocator.generations` of the target's blocks.
    """

    def __init__(
        self,
        head: DraftHead,
        runner: Any,
        limits: SchedulerConfig,
        num_drafts: int,
        generations: Sequence[int],
    ) -> None:
        c = head.config
        size = limits.block_size
        self._head = head
        self._device = runner.model.device
        self._tap: FeatureTap = runner.features
        self._last_position = limits.max_model_len - 1
        self._num_spare = num_spare_blocks(size, num_drafts)
        self._num_blocks = limits.num_blocks
        num_blocks = limits.num_blocks + self._num_spare * limits.max_num_seqs
        if c.mla is None:
            geometry = KVGeometry.uniform(1, c.num_kv_heads, c.head_dim, size, runner.model.dtype)
        else:
            geometry = KVGeometry.of_model(c, runner.model.dtype, size)
        self.kv_cache = KVCache(geometry, num_blocks, runner.kv_cache.pool, "draft kv")
        self._generations = generations
        self._pages = HeadPages(size, generations)
        self._sequences: dict[Request, HeadSequence] = {}
        self._rows: dict[Request, _Rows] = {}
        self._fault: Exception | None = None
        self._sampler = Sampler()
        self._costs = self._measured(limits.max_num_seqs, runner.model.config.hidden_size)
        self._tap.on_step = self._take

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[Drafts | None]:
        """Return drafts of each request; None if the features of its last token are gone."""
        if self._fault is not None:
            fault = self._fault
            self._fault = None
            raise fault
        try:
            return self._propose(wanted)
        except BaseException:
            self._reset()
            raise

    def forget(self, request: Request) -> None:
        """Drop the state of a request; the record of its filled blocks stays."""
        self._sequences.pop(request, None)
        self._rows.pop(request, None)

    def cost(self, num_sequences: int, num_tokens: int) -> float:
        """Return the seconds to propose `num_tokens` drafts for each sequence."""
        return self._costs.seconds(num_sequences, num_tokens)

    def close(self) -> None:
        """Free the pages and drop the head; a second call does nothing."""
        if self.kv_cache.is_closed:
            return
        self._tap.on_step = None
        self._rows = {}
        self.kv_cache.close()
        del self._head

    # ---- after a step was launched

    def _take(self, output: ScheduleOutput, first_tokens: Any, features: Features) -> None:
        """Keep the features of a step; store the keys of tokens whose successor is known.

        An error in the head must not fail the step: it is raised by the next proposal.
        """
        try:
            self._note(output, first_tokens, features)
        except Exception as error:
            self._fault = error
            self._reset()

    def _note(self, output: ScheduleOutput, first_tokens: Any, features: Features) -> None:
        kept = self._rows if self._tap.are_lasting else {}
        self._rows = {request: rows for request, rows in kept.items() if _is_running(request)}
        works = []
        for sequence, first in zip(output.sequences, first_tokens.tolist(), strict=True):
            request = sequence.request
            start = sequence.start
            # A pipeline computes steps of requests that have ended or lost their blocks since.
            if not request.spec.params.use_speculation or not _is_running(request):
                continue
            stop = start + sequence.num_scheduled_tokens
            self._rows[request] = _Rows(features, first, start, stop)
            own = self._sequences.get(request)
            if own is None:
                own = self._sequences[request] = HeadSequence()
            stop = min(sequence.num_reached_tokens, request.num_known_tokens - 1)
            if stop > start or own.next_position > start:
                self._pages.follow(own, request)
                self._pages.rewind(own, start)  # an earlier step with these tokens may have failed
            if stop > start:
                work = self._work(request, stop)
                works += [] if work is None else [work]
        self._store(works)

    # ---- helpers of propose

    def _propose(self, wanted: Sequence[tuple[Request, int]]) -> list[Drafts | None]:
        pairs = [(self._ready(request), count) for request, count in wanted]
        counts = {work.request: count for work, count in pairs if work is not None}
        chains: dict[Request, Drafts] = {}
        for works in _by_features(work for work, _ in pairs if work is not None):
            self._store([replace(work, stop=work.stop - 1) for work in works])
            ids = self._draft(works, max(counts[work.request] for work in works))
            for row, work in enumerate(works):
                chains[work.request] = DeferredDrafts(ids, row, counts[work.request])
        return [chains.get(request) for request, _ in wanted]

    def _ready(self, request: Request) -> _Work | None:
        """Return the keys to compute for the first draft; None if their features are missing."""
        stop = request.num_known_tokens - 1
        return self._work(request, stop) if request.num_committed_tokens >= stop else None

    def _work(self, request: Request, stop: int) -> _Work | None:
        """Allocate room for keys up to position `stop`; None if the last token has no features."""
        rows = self._rows.get(request)
        if rows is None or request.shares_last_block:  # the target copies it before its next write
            return None
        sequence = self._sequences[request]
        self._pages.follow(sequence, request)
        start = max(rows.start, sequence.next_position)
        if not start < stop <= rows.stop:
            return None
        first_key = self._pages.extend(sequence, request, start, stop)
        first_row = rows.first + start - rows.start
        return _Work(request, start, stop, first_key, rows.features, first_row)

    def _store(self, works: Sequence[_Work]) -> None:
        """Compute and store the keys and values of `works`, which have the same features."""
        works = [work for work in works if work.stop > work.start]
        if not works:
            return
        ids = [work.request.token_ids(work.start + 1, work.stop + 1) for work in works]
        counts = [len(one) for one in ids]
        positions = [np.arange(work.start, work.stop) for work in works]
        rows = [work.first_row + np.arange(n) for work, n in zip(works, counts, strict=True)]
        starts = [work.first_key for work in works]
        batch = self._batch(works, ids, starts, positions).to(self._device)
        state = self._state(works[0].features, np.concatenate(rows))
        self._head.store(batch.token_ids, state, batch, self.kv_cache.layer(0))

    def _draft(self, works: Sequence[_Work], count: int) -> DraftIds:
        """Return `count` draft ids per request, on the device; arbitrary if none can be sampled."""
        xp = self._device.xp
        requests = [work.request for work in works]
        lasts = [work.stop - 1 - work.start for work in works]
        rows = np.array([w.first_row + i for w, i in zip(works, lasts, strict=True)])
        state = self._state(works[0].features, rows)
        batches = self._chain_batches(works, count)
        token_ids = None
        drafts = []
        for step, batch in enumerate(batches):
            token_ids = batch.token_ids if token_ids is None else token_ids
            state = self._head.forward(token_ids, state, batch, self.kv_cache.layer(0))
            positions = np.array([work.stop + 1 + step for work in works])
            sampling = _sampling(requests, positions, xp)
            token_ids = self._sampler(self._head.logits(state), sampling).token_ids
            token_ids = xp.maximum(token_ids, 0)
            drafts.append(token_ids)
        ids = xp.stack(drafts, axis=1)
        copy = DeviceToHostCopy(self._device, {"ids": ids})
        return DraftIds(ids, lambda: copy.wait()["ids"].tolist())

    def _chain_batches(self, works: Sequence[_Work], count: int) -> Iterator[ForwardBatch]:
        """Yield the batch of each of `count` drafts; only the first contains token ids.

        Positions are clamped to the last row of the rope table. Only drafts beyond the number that
        their request may still use can reach it, and those are dropped.
        """
        keys = np.array([w.first_key + w.stop - 1 - w.start for w in works], np.int32)
        ids = [work.request.token_ids(work.stop, work.stop + 1) for work in works]
        positions = np.array([work.stop - 1 for work in works], np.int32)
        first = self._batch(works, ids, keys.tolist(), [positions])
        tables = first.block_tables
        size = self.kv_cache.geometry.block_size
        batch = first.to(self._device)
        yield batch
        for step in range(1, count):
            places = keys + np.int32(step)
            blocks = tables[np.arange(len(works)), places // size].astype(np.int64)
            yield replace(
                first,
                positions=places,
                rope_positions=np.minimum(positions + np.int32(step), self._last_position),
                slot_mapping=blocks * size + places % size,
                context_lens=places + np.int32(1),
                max_context_len=int(places.max()) + 1,
                block_tables=batch.block_tables,
            ).to(self._device)

    def _reset(self) -> None:
        """Forget all keys, as some may not have been written."""
        self._rows = {}
        self._sequences = {}
        self._pages = HeadPages(self.kv_cache.geometry.block_size, self._generations)

    def _state(self, features: Features, rows: Any) -> Any:
        """Return the head's input state, combined from these rows of the features."""
        index = self._device.xp.asarray(rows.astype(np.int32))
        layers = [features[layer] for layer in self._head.feature_layers]
        return self._head.combine([kernels.embedding(index, one) for one in layers])

    def _batch(
        self, works: Sequence[_Work], ids: Any, starts: list[int], positions: Sequence[Any]
    ) -> ForwardBatch:
        """Return a batch with some tokens per request; rope uses `positions`, not key indices."""
        tables = [
            [*self._sequences[work.request].table, *self._spare(number)]
            for number, work in enumerate(works)
        ]
        batch = ForwardBatch.build(ids, starts, tables, self.kv_cache.geometry.block_size)
        rope_positions = np.concatenate(positions).astype(np.int32)
        return replace(batch, rope_positions=rope_positions)

    def _spare(self, number: int) -> range:
        """Return the spare blocks that follow the table of sequence `number` of a batch."""
        first = self._num_blocks + number * self._num_spare
        return range(first, first + self._num_spare)

    # ---- costs

    def _measured(self, max_num_seqs: int, width: int) -> StepCosts:
        """Measure the cost of one draft; the cost of several is proportional."""
        sizes = [size for size in _SIZES if size < max_num_seqs] + [max_num_seqs]
        return StepCosts(sizes, [1], [[self._seconds(size, width)] for size in sizes])

    def _seconds(self, size: int, width: int) -> float:
        """Time one draft for `size` sequences; the first call, untimed, loads kernels."""
        device = self._device
        xp = self._device.xp
        times = []
        tables = [self._spare(number) for number in range(size)]
        shape = (size, width)
        dtype = np_dtype(self.kv_cache.geometry.dtype)
        features = [xp.zeros(shape, dtype) for _ in self._head.feature_layers]
        block_size = self.kv_cache.geometry.block_size
        for _ in range(1 + _CALLS):
            begin = time.perf_counter()
            batch = ForwardBatch.build([[0]] * size, [0] * size, tables, block_size).to(device)
            state = self._head.combine(features)
            state = self._head.forward(batch.token_ids, state, batch, self.kv_cache.layer(0))
            xp.argmax(self._head.logits(state), axis=1).tolist()
            times.append(time.perf_counter() - begin)
        return max(min(times[1:]), 1e-9)


def _is_running(request: Request) -> bool:
    return request.status is RequestStatus.RUNNING


def _by_features(works: Iterable[_Work]) -> Iterable[list[_Work]]:
    """Return the works in groups with the same features."""
    groups: dict[int, list[_Work]] = {}
    for work in works:
        groups.setdefault(id(work.features), []).append(work)
    return groups.values()


def _sampling(requests: Sequence[Request], positions: Any, xp: Any) -> SamplingBatch:
    """Return the sampling options at `positions`: temperature, filters and random draws."""
    params = [request.spec.params for request in requests]
    columns = {
        "temperature": ([0.0 if p.greedy else p.temperature for p in params], np.float32),
        "top_k": ([max(p.top_k, 0) for p in params], np.int32),
        "top_p": ([max(p.top_p, _TINY) for p in params], np.float32),
        "min_p": ([p.min_p for p in params], np.float32),
        "seeds": ([request.spec.seed for request in requests], np.uint64),
        "positions": (positions, np.int64),
    }
    arrays = {name: xp.asarray(np.array(*column)) for name, column in columns.items()}
    return SamplingBatch(**arrays)
