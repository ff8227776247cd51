"""Runs one step: moves blocks, lays out the batch, walks the model, samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import numpy as np

from engine import kernels
from engine.cache.kv_cache import KVCache
from engine.device import Device, to_numpy
from engine.layers.batch import ForwardBatch
from engine.layers.sampler import Sampler, SamplingRow, build_sampling_batch
from engine.outputs import Logprob
from engine.request import Request
from engine.runner.batch import build_batch, sampled_sequences
from engine.sampling_params import SamplingParams
from engine.scheduler.output import ScheduledSequence, ScheduleOutput

__all__ = ["ModelRunner", "RunnableModel", "StepResult"]


class RunnableModel(Protocol):
    """What the runner needs of a model (tests bring a mock)."""

    @property
    def device(self) -> Device:
        """Where it computes."""

    @property
    def long_rope_offset(self) -> int:
        """First row of the long factors in the rope table; 0 where there are none."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a sequence."""

    def forward(self, batch: ForwardBatch, kv_pages: Any) -> Any:
        """Return the logits (R, V) float32 of the batch's `logits_indices`."""


@dataclass
class StepResult:
    """What a step sampled.

    Attributes
    ----------
    token_ids : dict of str to list of int
        Request id -> the ids sampled for it.
    logprobs : dict of str to list of dict
        Request id -> per id, token -> `Logprob`; only where asked for.
    failed : dict of str to str
        Request id -> why nothing could be sampled for it.
    """

    token_ids: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[dict[int, Logprob]]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


class ModelRunner:
    """Computes scheduled steps on one model and one KV cache.

    Parameters
    ----------
    model : RunnableModel
    kv_cache : KVCache
        On the model's device.
    seeds : mapping of str to int
        Request id -> seed; kept by the engine, read here.
    """

    def __init__(self, model: RunnableModel, kv_cache: KVCache, seeds: Mapping[str, int]) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self._seeds = seeds
        self._eos_token_ids = model.eos_token_ids
        self._sampler = Sampler()

    def execute(self, output: ScheduleOutput) -> StepResult:
        """Compute `output` and return what was sampled."""
        self._move_blocks(output)
        batch = build_batch(
            output,
            block_size=self.kv_cache.geometry.block_size,
            long_rope_offset=self.model.long_rope_offset,
        )
        logits = self.model.forward(batch.to(self.model.device), self.kv_cache.layers)
        return self._sample(logits, sampled_sequences(output))

    def _move_blocks(self, output: ScheduleOutput) -> None:
        if output.copies:
            pairs = self.model.device.xp.asarray(output.copies, np.int32)
            kernels.kv_copy(self.kv_cache.flat_pages, pairs)

    def _sample(self, logits: Any, sequences: list[ScheduledSequence]) -> StepResult:
        result = StepResult()
        if not sequences:
            return result
        rows = [self._row(sequence) for sequence in sequences]
        sampled = self._sampler(logits, build_sampling_batch(self.model.device.xp, rows))
        token_ids = to_numpy(sampled.token_ids).tolist()
        for row, (sequence, status) in enumerate(
            zip(sequences, to_numpy(sampled.status).tolist(), strict=True)
        ):
            name = sequence.request.request_id
            if status:
                result.failed[name] = "its logits are NaN, or leave no token to choose"
                continue
            result.token_ids[name] = [token_ids[row]]
        _add_logprobs(result, sequences, sampled)
        return result

    def _row(self, sequence: ScheduledSequence) -> SamplingRow:
        request = sequence.request
        return SamplingRow(
            params=_params(request),
            history=_History(request),
            prompt_len=request.num_prompt_tokens,
            seed=self._seeds[request.request_id],
            position=request.num_known_tokens,
            eos_token_ids=self._eos_token_ids,
        )


def _params(request: Request) -> SamplingParams:
    """Return what the engine put into the request; the scheduler knows only a part of it."""
    return cast(SamplingParams, request.sampling_params)


class _History(Sequence[int]):
    """The known ids of a request; joined only if a penalty reads them."""

    def __init__(self, request: Request) -> None:
        self._request = request

    def __len__(self) -> int:
        return self._request.num_known_tokens

    def __getitem__(self, index: Any) -> Any:
        return self._request.token_ids(0, len(self))[index]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.array(self._request.token_ids(0, len(self)), dtype)


def _add_logprobs(result: StepResult, sequences: list[ScheduledSequence], sampled: Any) -> None:
    """Turn the sampler's arrays into `Logprob`s, for the requests that asked for them."""
    if sampled.logprobs is None:
        return
    chosen = to_numpy(sampled.logprobs).tolist()
    top_ids = to_numpy(sampled.top_ids).tolist() if sampled.top_ids is not None else None
    top = to_numpy(sampled.top_logprobs).tolist() if sampled.top_logprobs is not None else None
    for row, sequence in enumerate(sequences):
        request = sequence.request
        count, ids = _params(request).logprobs, result.token_ids.get(request.request_id)
        if count is None or ids is None:
            continue
        entry = {}
        if top_ids is not None and top is not None:
            for rank in range(min(count, len(top_ids[row]))):
                entry[top_ids[row][rank]] = Logprob(top[row][rank], rank + 1)
        entry.setdefault(ids[0], Logprob(chosen[row]))
        result.logprobs[request.request_id] = [entry]
