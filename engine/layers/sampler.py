"""The sampler: from the requests' sampling parameters to the arrays of `kernels.sample`.

`build_sampling_batch` runs on the host, once a step; arrays that no row needs are left out, so
that a batch of plain requests pays for no penalty, bias or mask. `Sampler` makes the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from engine import device, kernels
from engine.errors import RequestError
from engine.kernels.sample import MAX_LOGPROBS, SampleResult
from engine.sampling_params import SamplingParams

__all__ = ["Sampler", "SamplingBatch", "SamplingRow", "build_sampling_batch"]

_TINY = np.finfo(np.float32).tiny  # what a positive parameter is at least, once it is a float32


@dataclass(frozen=True)
class SamplingRow:
    """What the sampler must know of one sequence.

    Attributes
    ----------
    params : SamplingParams
    history : sequence of int
        Ids so far, prompt first.
    prompt_len : int
        How many of these are the prompt.
    seed : int
        Any integer; taken modulo 2**64.
    position : int
        Place in the sequence of the token to be sampled.
    eos_token_ids : sequence of int
        What must not be sampled before `params.min_tokens` tokens, besides `stop_token_ids`;
        passed over when `params.ignore_eos`.
    """

    params: SamplingParams
    history: Sequence[int]
    prompt_len: int
    seed: int
    position: int
    eos_token_ids: Sequence[int] = ()

    @property
    def has_penalty(self) -> bool:
        """Tell whether any penalty changes a logit."""
        p = self.params
        neutral = (p.repetition_penalty, p.presence_penalty, p.frequency_penalty) == (1, 0, 0)
        return not neutral and len(self.history) > 0

    @property
    def forbidden(self) -> frozenset[int]:
        """Ids that would end the sequence before `min_tokens` tokens were made."""
        if len(self.history) - self.prompt_len >= self.params.min_tokens:
            return frozenset()
        eos = () if self.params.ignore_eos else self.eos_token_ids
        return frozenset((*eos, *(self.params.stop_token_ids or ())))

    @property
    def bias(self) -> dict[int, float]:
        """Id -> what is added to its logit."""
        return dict(self.params.logit_bias or {}) | dict.fromkeys(self.forbidden, -np.inf)


@dataclass(frozen=True)
class SamplingBatch:
    """Arrays of `kernels.sample` by the names they have there; None is: no row needs it.

    Filled by `build_sampling_batch`, read by `Sampler`. B rows, in the order of the logits.

    Attributes
    ----------
    num_logprobs : int or None
        Most log-probabilities that any row wants; -1 is the whole vocabulary.
    allowed_ids : tuple or None
        Per row the ids that may be sampled (None: all). A host value: the mask that
        `kernels.sample` wants is packed when the size of the vocabulary is known.
    """

    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    seeds: Any
    positions: Any
    history: Any = None
    history_lens: Any = None
    prompt_lens: Any = None
    repetition_penalty: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    logit_bias_ids: Any = None
    logit_bias_values: Any = None
    cu_logit_bias: Any = None
    num_logprobs: int | None = None
    allowed_ids: tuple[Sequence[int] | None, ...] | None = None


def build_sampling_batch(xp: Any, rows: Sequence[SamplingRow]) -> SamplingBatch:
    """Lay `rows` out as arrays.

    Parameters
    ----------
    xp : module
        `numpy` or `cupy`: where the arrays go.
    rows : sequence of SamplingRow

    Raises
    ------
    RequestError
        If a row asks for what is not implemented (bad_words, logits_processors).

    Examples
    --------
    >>> row = SamplingRow(SamplingParams(temperature=0.0), [5, 6], 2, seed=1, position=2)
    >>> batch = build_sampling_batch(np, [row])
    >>> batch.temperature, batch.history
    (array([0.], dtype=float32), None)
    """
    params = [row.params for row in rows]
    for p in params:
        if p.bad_words or p.logits_processors:
            raise RequestError("bad_words and logits_processors are not implemented")
    arrays: dict[str, Any] = {
        "temperature": np.array([0.0 if p.greedy else p.temperature for p in params], np.float32),
        "top_k": np.array([max(p.top_k, 0) for p in params], np.int32),
        "top_p": np.maximum(np.array([p.top_p for p in params], np.float32), _TINY),
        "min_p": np.array([p.min_p for p in params], np.float32),
        "seeds": np.array([row.seed % 2**64 for row in rows], np.uint64),
        "positions": np.array([row.position for row in rows], np.int64),
        **_penalties(rows),
        **_logit_bias(rows),
    }
    allowed = tuple(p.allowed_token_ids for p in params)
    return SamplingBatch(
        **{name: xp.asarray(array) for name, array in arrays.items()},
        num_logprobs=_most_logprobs([p.logprobs for p in params]),
        allowed_ids=None if all(ids is None for ids in allowed) else allowed,
    )


class Sampler:
    """Samples the logits of a batch."""

    def __call__(self, logits: Any, batch: SamplingBatch) -> SampleResult:
        """Return one token, and the log-probabilities asked for, per row.

        Parameters
        ----------
        logits : (B, V) array of float32
            Stay as they are.
        batch : SamplingBatch
            On the same device.

        Raises
        ------
        ShapeError, DTypeError, ContractError
            If the logits do not fit the batch.
        """
        args = {f.name: getattr(batch, f.name) for f in fields(batch)}
        num_logprobs, allowed_ids = args.pop("num_logprobs"), args.pop("allowed_ids")
        xp, vocab_size = device.array_module(logits), logits.shape[-1]
        if allowed_ids is not None:
            args["allowed"] = xp.asarray(_pack_allowed(allowed_ids, vocab_size))
        if num_logprobs is None or 0 <= num_logprobs <= min(MAX_LOGPROBS, vocab_size):
            return kernels.sample(logits, num_logprobs=num_logprobs, **args)
        count = vocab_size if num_logprobs < 0 else min(num_logprobs, vocab_size)
        return _add_top(xp, logits, kernels.sample(logits, num_logprobs=0, **args), count)


def _penalties(rows: Sequence[SamplingRow]) -> dict[str, Any]:
    """Return histories and penalties if any row is penalised; only such rows have a history."""
    if not any(row.has_penalty for row in rows):
        return {}
    histories = [row.history if row.has_penalty else () for row in rows]
    longest = max(map(len, histories))
    arrays: dict[str, Any] = {
        "history": np.zeros((len(rows), longest), np.int32),
        "history_lens": np.array([len(ids) for ids in histories], np.int32),
        "prompt_lens": np.array(
            [min(row.prompt_len, len(ids)) for row, ids in zip(rows, histories, strict=True)],
            np.int32,
        ),
    }
    for line, ids in zip(arrays["history"], histories, strict=True):
        line[: len(ids)] = ids
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        values = np.array([getattr(row.params, name) for row in rows], np.float32)
        if name == "repetition_penalty":
            values = np.maximum(values, _TINY)
        arrays[name] = values
    return arrays


def _logit_bias(rows: Sequence[SamplingRow]) -> dict[str, Any]:
    """Return the biases of all rows one after the other, if there are any."""
    biases = [row.bias for row in rows]
    if not any(biases):
        return {}
    return {
        "logit_bias_ids": np.array([id for bias in biases for id in bias], np.int32),
        "logit_bias_values": np.array([b for bias in biases for b in bias.values()], np.float32),
        "cu_logit_bias": np.cumsum([0, *map(len, biases)], dtype=np.int32),
    }


def _most_logprobs(wanted: Sequence[int | None]) -> int | None:
    """Return the count that serves every row: -1 (all) beats any other, None is none."""
    counts = [count for count in wanted if count is not None]
    if not counts:
        return None
    return -1 if min(counts) < 0 else max(counts)


def _pack_allowed(allowed_ids: tuple[Sequence[int] | None, ...], vocab_size: int) -> Any:
    """Return the mask (B, ceil(V/32)) int32 whose bits are the ids that each row allows."""
    bits = np.zeros((len(allowed_ids), -(-vocab_size // 32) * 32), np.uint8)
    for line, ids in zip(bits, allowed_ids, strict=True):
        line[slice(None) if ids is None else np.asarray(ids, np.int64)] = 1
    return np.packbits(bits, axis=1, bitorder="little").view(np.int32)


def _add_top(xp: Any, logits: Any, result: SampleResult, count: int) -> SampleResult:
    """Add more log-probabilities than the kernel gives (it stops at 20), by a sort of each row."""
    bad = (result.status != 0)[:, None]
    safe = xp.where(bad, np.float32(0), logits)
    top_ids = xp.argsort(-safe, axis=1, kind="stable")[:, :count].astype(np.int32)
    shifted = safe - safe.max(axis=1, keepdims=True)
    logprobs = shifted - xp.log(xp.exp(shifted).sum(axis=1, keepdims=True))
    top_logprobs = xp.take_along_axis(logprobs, top_ids.astype(np.int64), axis=1)
    return result._replace(
        top_ids=xp.where(bad, np.int32(-1), top_ids),
        top_logprobs=xp.where(bad, np.float32(np.nan), top_logprobs),
    )
