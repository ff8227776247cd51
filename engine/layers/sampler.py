"""The sampler: one token per row of logits.

`SamplingBatch` holds the arrays of `kernels.sample`. Arrays that no row needs are None, so that a
batch of plain requests does not pay for penalties, biases or masks. `Sampler` calls the op.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from engine import device, kernels
from engine.kernels.sample import MAX_LOGPROBS, SampleResult
from engine.layers.candidate_filters import kept_tokens, pack_rows

__all__ = ["Sampler", "SamplingBatch", "pack_allowed"]

_FILTERS = ("filter_rows", "typical_p", "top_n_sigma", "xtc_threshold")


@dataclass(frozen=True)
class SamplingBatch:
    """Arguments of `kernels.sample` by name; an argument that no row needs is None.

    The runner fills it, `Sampler` reads it. B rows, in the order of the logits.

    Attributes
    ----------
    filter_rows : (n,) array of int64, or None
        Rows whose candidates the next three filter, in addition to `top_k` and others.
    typical_p, top_n_sigma, xtc_threshold : (n,) array of float32, or None
        See `candidate_filters.kept_tokens`.
    num_logprobs : int or None
        Maximum number of log-probabilities requested by any row; -1: the whole vocabulary.
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
    allowed: Any = None
    allowed_rows: Any = None
    filter_rows: Any = None
    typical_p: Any = None
    top_n_sigma: Any = None
    xtc_threshold: Any = None
    num_logprobs: int | None = None

    @classmethod
    def greedy(cls, xp: Any, count: int) -> SamplingBatch:
        """Return the arguments for `count` rows whose most probable token is taken."""
        dtypes = {"temperature": np.float32, "top_k": np.int32, "min_p": np.float32}
        dtypes |= {"seeds": np.uint64, "positions": np.int64}
        zeros = {name: xp.zeros(count, dtype) for name, dtype in dtypes.items()}
        return cls(top_p=xp.ones(count, np.float32), **zeros)


class Sampler:
    """Samples the logits of a batch."""

    def __call__(self, logits: Any, batch: SamplingBatch) -> SampleResult:
        """Return one token and the requested log-probabilities per row.

        Parameters
        ----------
        logits : (B, V) array of float32
            Not modified.
        batch : SamplingBatch
            On the same device.

        Raises
        ------
        ShapeError, DTypeError, ContractError
            If the shapes or dtypes of logits and batch do not match.
        """
        args = {f.name: getattr(batch, f.name) for f in fields(batch)}
        num_logprobs = args.pop("num_logprobs")
        filters = {name: args.pop(name) for name in _FILTERS}
        if batch.filter_rows is not None:
            args |= _filtered(logits, batch, **filters)
        xp = device.array_module(logits)
        vocab_size = logits.shape[-1]
        if num_logprobs is None or 0 <= num_logprobs <= min(MAX_LOGPROBS, vocab_size):
            return kernels.sample(logits, num_logprobs=num_logprobs, **args)
        count = vocab_size if num_logprobs < 0 else min(num_logprobs, vocab_size)
        return _add_top(xp, logits, kernels.sample(logits, num_logprobs=0, **args), count)


def _filtered(
    logits: Any, batch: SamplingBatch, filter_rows: Any, **filters: Any
) -> dict[str, Any]:
    """Return the masks of the batch, and those of the rows whose candidates are filtered."""
    xp = device.array_module(logits)
    count, size = logits.shape
    rows = logits[filter_rows]
    masks = xp.zeros((0, -(-size // 32)), np.int32)
    places = xp.full(count, -1, np.int32)
    if batch.allowed is not None:
        masks = batch.allowed
        places = batch.allowed_rows
        places = xp.arange(count, dtype=np.int32) if places is None else places.copy()
        own = places[filter_rows]
        ids = xp.arange(size)
        has_mask = (own >= 0) & (own < len(masks))
        words = masks[xp.where(has_mask, own, 0)][:, ids // 32]
        is_allowed = (words >> (ids % 32).astype(np.int32)) & 1
        rows = xp.where((is_allowed == 1) | ~has_mask[:, None], rows, np.float32(-np.inf))
    if batch.cu_logit_bias is not None:
        rows = rows + _biases(xp, batch, count, size)[filter_rows]
    if batch.history is not None:
        rows = _penalised(xp, batch, rows, filter_rows)
    keep = pack_rows(kept_tokens(rows, **filters))
    places[filter_rows] = len(masks) + xp.arange(len(filter_rows), dtype=np.int32)
    return {"allowed": xp.concatenate([masks, keep]), "allowed_rows": places}


def _biases(xp: Any, batch: SamplingBatch, count: int, size: int) -> Any:
    """Return the logit biases of all rows, (count, size) float32."""
    dense = xp.zeros((count, size), np.float32)
    index = xp.arange(len(batch.logit_bias_ids))
    owners = xp.searchsorted(batch.cu_logit_bias[1:], index, side="right")
    dense[owners, batch.logit_bias_ids] = batch.logit_bias_values
    return dense


def _penalised(xp: Any, batch: SamplingBatch, rows: Any, chosen: Any) -> Any:
    """Return `rows` (n, V), the logits of the batch's rows `chosen`, with their penalties."""
    ids = batch.history[chosen]
    columns = xp.arange(ids.shape[1])
    is_known = (columns < batch.history_lens[chosen][:, None]) & (ids >= 0) & (ids < rows.shape[1])
    index = xp.arange(len(rows))[:, None], xp.where(is_known, ids, 0)  # others count 0 times
    if batch.repetition_penalty is not None:
        num_known = xp.zeros_like(rows)
        xp.add.at(num_known, index, is_known.astype(np.float32))
        factor = batch.repetition_penalty[chosen][:, None]
        rows = xp.where(num_known > 0, xp.where(rows > 0, rows / factor, rows * factor), rows)
    is_output = is_known & (columns >= batch.prompt_lens[chosen][:, None])
    num_output = xp.zeros_like(rows)
    xp.add.at(num_output, index, is_output.astype(np.float32))
    if batch.frequency_penalty is not None:
        rows = rows - batch.frequency_penalty[chosen][:, None] * num_output
    if batch.presence_penalty is not None:
        rows = rows - batch.presence_penalty[chosen][:, None] * (num_output > 0)
    return rows


def pack_allowed(token_ids: Sequence[int], vocab_size: int) -> np.ndarray[Any, Any]:
    """Return the mask (ceil(V/32),) int32 with a bit set for each token id that may be sampled.

    Examples
    --------
    >>> pack_allowed([0, 33], vocab_size=40)
    array([1, 2], dtype=int32)
    """
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[np.asarray(token_ids, np.int64)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def _add_top(xp: Any, logits: Any, result: SampleResult, count: int) -> SampleResult:
    """Add `count` log-probabilities by sorting each row: the kernel returns at most 20."""
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
