"""Log-probabilities of prompt tokens, from the hidden states of a prefill.

The logits of a long prompt would not fit into memory, so they are computed one slice at a time and
discarded. Only each token's log-probability, its rank and the most probable ids are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.device import Device
from engine.layers.sampler import Sampler, SamplingBatch
from engine.outputs import Logprob
from engine.request import Request
from engine.runner.result import StepResult, logprob_entries, ranks_of
from engine.runner.transfer import DeviceToHostCopy, HostToDeviceCopy
from engine.scheduler.output import ScheduledSequence

__all__ = ["PromptPart", "ScoredPart", "prompt_parts", "score_parts"]

_SLICE_LOGITS = 1 << 24  # maximum logits in memory at once: 64 MiB
_CERTAIN = np.float32(1e30)  # logit bias that makes greedy sampling choose its id


@dataclass(frozen=True)
class PromptPart:
    """Prompt tokens that one step can score for one request.

    Attributes
    ----------
    request : Request
    count : int
        Number of most probable ids to return along with each token; -1 for all.
    position : int
        Position of the first token to score.
    token_ids : list of int
        Tokens to score.
    first_row : int
        Batch row whose hidden state predicts the first token.
    """

    request: Request
    count: int
    position: int
    token_ids: list[int]
    first_row: int

    @property
    def rows(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Batch rows whose logits are needed."""
        return np.arange(self.first_row, self.first_row + len(self.token_ids), dtype=np.int32)


@dataclass(frozen=True)
class ScoredPart:
    """A part whose scores are being copied to the host."""

    part: PromptPart
    slices: list[DeviceToHostCopy]

    def read(self, result: StepResult) -> None:
        """Wait for the scores and add them to `result`."""
        entries: list[dict[int, Logprob]] = []
        ids = self.part.token_ids
        for copy in self.slices:
            arrays = copy.wait()
            num_rows = len(arrays["logprobs"])
            chosen = ids[len(entries) : len(entries) + num_rows]
            entries += logprob_entries(arrays, range(num_rows), chosen, self.part.count)
        result.prompt_logprobs[self.part.request] = self.part.position, entries


def prompt_parts(
    sequences: Sequence[ScheduledSequence],
    first_rows: Sequence[int],
    counts: Sequence[int | None],
) -> list[PromptPart]:
    """Return the prompt tokens a step can score: those that follow a token it computes.

    A prompt with longrope's short factors is not scored again with the long factors, once its
    continuation needs them.

    Parameters
    ----------
    sequences : sequence of ScheduledSequence
    first_rows : sequence of int
        Each sequence's first row in the batch.
    counts : sequence of (int or None)
        Each request's `prompt_logprobs`.
    """
    parts = []
    for sequence, row, count in zip(sequences, first_rows, counts, strict=True):
        request = sequence.request
        prompt = request.prompt_token_ids
        if request.long_rope and len(prompt) <= request.short_rope_len:
            continue
        ids = prompt[sequence.start + 1 : sequence.context_len + 1]
        if count is not None and ids:
            parts.append(PromptPart(request, count, sequence.start + 1, ids, row))
    return parts


def score_parts(
    parts: Sequence[PromptPart],
    hidden: Any,
    to_logits: Callable[[Any], Any],
    sampler: Sampler,
    device: Device,
    vocab_size: int,
) -> list[ScoredPart]:
    """Score `parts`; `hidden` (M, N) concatenates their hidden states."""
    size = max(1, _SLICE_LOGITS // vocab_size)
    scored = []
    first = 0
    for part in parts:
        slices = []
        for start in range(0, len(part.token_ids), size):
            ids = part.token_ids[start : start + size]
            rows = hidden[first + start : first + start + len(ids)]
            slices.append(_score(to_logits(rows), ids, part.count, sampler, device))
        scored.append(ScoredPart(part, slices))
        first += len(part.token_ids)
    return scored


def _score(
    logits: Any, token_ids: list[int], count: int, sampler: Sampler, device: Device
) -> DeviceToHostCopy:
    """Score `token_ids`: a logit bias makes the sampler choose and score them."""
    num_rows = len(token_ids)
    columns = {
        "temperature": np.zeros(num_rows, np.float32),
        "top_k": np.zeros(num_rows, np.int32),
        "top_p": np.ones(num_rows, np.float32),
        "min_p": np.zeros(num_rows, np.float32),
        "seeds": np.zeros(num_rows, np.uint64),
        "positions": np.zeros(num_rows, np.int64),
        "logit_bias_ids": np.array(token_ids, np.int32),
        "logit_bias_values": np.full(num_rows, _CERTAIN),
        "cu_logit_bias": np.arange(num_rows + 1, dtype=np.int32),
    }
    on_device = HostToDeviceCopy(device, columns).arrays
    sampled = sampler(logits, SamplingBatch(num_logprobs=count, **on_device))
    ranks = ranks_of(device.xp, logits, on_device["logit_bias_ids"])
    arrays = {
        "logprobs": sampled.logprobs,
        "ranks": ranks,
        "top_ids": sampled.top_ids,
        "top_logprobs": sampled.top_logprobs,
    }
    return DeviceToHostCopy(device, arrays)
