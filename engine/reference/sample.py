"""NumPy mirror of `engine.kernels.sample`: its specification."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from engine.reference import _exact_math as exact
from engine.reference._philox import gumbel, gumbel_all

__all__ = ["BAD_ID", "BAD_LOGITS", "BAD_PARAMETER", "OK", "SampleResult", "sample"]

Array = np.ndarray[Any, Any]

OK = 0
BAD_LOGITS = 1
BAD_PARAMETER = 2
BAD_ID = 3  # A user's sampler chose an id outside the vocabulary.

_LOG2_E = np.float32(1.4426950408889634)
_FLOAT_MAX = np.finfo(np.float32).max
_ID_MASK = np.uint64(2**32 - 1)
_GROUP = 1 << 18  # logits processed at a time, to stay in a core's cache


class SampleResult(NamedTuple):
    """Result of `sample`, one array per field. See `engine.kernels.sample`."""

    token_ids: Any
    status: Any
    logprobs: Any
    top_ids: Any
    top_logprobs: Any
    num_kept: Any


def sample(
    logits: Array,
    *,
    temperature: Array,
    top_k: Array,
    top_p: Array,
    min_p: Array,
    seeds: Array,
    positions: Array,
    history: Array | None = None,
    history_lens: Array | None = None,
    prompt_lens: Array | None = None,
    repetition_penalty: Array | None = None,
    presence_penalty: Array | None = None,
    frequency_penalty: Array | None = None,
    logit_bias_ids: Array | None = None,
    logit_bias_values: Array | None = None,
    cu_logit_bias: Array | None = None,
    allowed: Array | None = None,
    allowed_rows: Array | None = None,
    num_logprobs: int | None = None,
) -> SampleResult:
    """Process, filter and sample each row; rows are independent of each other."""
    num_rows, vocab = logits.shape
    penalties = (repetition_penalty, presence_penalty, frequency_penalty)
    work = logits
    if cu_logit_bias is not None or allowed is not None or history is not None:
        work = logits.copy()
        with np.errstate(all="ignore"):  # the row's status reports overflow
            _add_bias(work, logit_bias_ids, logit_bias_values, cu_logit_bias)
            _forbid(work, allowed, allowed_rows)
            _penalize(work, history, history_lens, prompt_lens, *penalties)
    token_ids = np.full(num_rows, -1, np.int32)
    num_kept = np.zeros(num_rows, np.int32)
    status = np.where(_usable(temperature, top_p, min_p, *penalties), OK, BAD_PARAMETER)
    step = max(1, _GROUP // max(vocab, 1))
    for start in range(0, num_rows, step):
        rows = slice(start, start + step)
        best = np.argmax(work[rows], axis=1)  # the lowest id of ties; NaN counts as the maximum
        finite = np.isfinite(np.take_along_axis(work[rows], best[:, None], 1)[:, 0])
        if work is not logits:  # also report NaN or inf of forbidden ids
            finite &= ~np.any(np.isnan(logits[rows]) | (logits[rows] == np.inf), axis=1)
        status[rows][(status[rows] == OK) & ~finite] = BAD_LOGITS
        good = np.flatnonzero(status[rows] == OK)
        token_ids[start + good] = best[good]
        num_kept[start + good] = 1
        drawn = start + good[temperature[rows][good] > 0]
        if len(drawn):
            filters = (temperature[drawn], top_k[drawn], top_p[drawn], min_p[drawn])
            token_ids[drawn], num_kept[drawn] = _draw(
                work[drawn], *filters, seeds[drawn], positions[drawn]
            )
    return _result(logits, token_ids, status.astype(np.int32), num_kept, num_logprobs)


def _add_bias(work: Array, ids: Any, values: Any, cu: Array | None) -> None:
    """logit[id] += value; the ids of a row are distinct."""
    if cu is not None:
        rows = np.repeat(np.arange(len(work)), np.diff(cu))
        inside = (ids >= 0) & (ids < work.shape[1])
        work[rows[inside], ids[inside]] += values[inside]


def _forbid(work: Array, allowed: Array | None, mask_rows: Array | None) -> None:
    """Set the logits of ids whose bit is 0 to -inf (bit i of word w is id 32 w + i)."""
    if allowed is None:
        return
    for b, row in enumerate(work):
        index = b if mask_rows is None else int(mask_rows[b])
        if 0 <= index < len(allowed):
            octets = np.ascontiguousarray(allowed[index]).view(np.uint8)
            bits = np.unpackbits(octets, count=row.size, bitorder="little")
            row[bits == 0] = -np.inf


def _penalize(
    work: Array,
    history: Any,
    lens: Any,
    prompt_lens: Any,
    repetition: Any,
    presence: Any,
    freq: Any,
) -> None:
    """Apply penalties: repetition to ids in prompt or output, the others to ids in the output."""
    if history is None:
        return
    num_rows, vocab = work.shape
    columns = np.arange(lens.max(initial=0))
    ids = history[:, : len(columns)]
    known = (columns < lens[:, None]) & (ids >= 0) & (ids < vocab)
    keys = np.arange(num_rows)[:, None] * vocab + ids  # (row, id) as one number
    if repetition is not None:
        seen = np.divmod(np.unique(keys[known]), vocab)
        values = work[seen]
        r = repetition[seen[0]]
        work[seen] = np.where(values > 0, values / r, values * r)
    if freq is None and presence is None:
        return
    is_output = known & (columns >= prompt_lens[:, None])
    flat, counts = np.unique(keys[is_output], return_counts=True)
    used = np.divmod(flat, vocab)
    if freq is not None:
        work[used] -= freq[used[0]] * counts.astype(np.float32)
    if presence is not None:
        work[used] -= presence[used[0]]


def _usable(
    temperature: Array, top_p: Array, min_p: Array, repetition: Any, presence: Any, freq: Any
) -> Array:
    """Return the mask of rows with all parameters in range (NaN never is)."""
    usable = (temperature >= 0) & (temperature <= _FLOAT_MAX)
    usable &= (top_p > 0) & (top_p <= 1) & (min_p >= 0) & (min_p <= 1)
    if repetition is not None:
        usable &= (repetition > 0) & (repetition <= _FLOAT_MAX)
    for penalty in (presence, freq):
        if penalty is not None:
            usable &= np.abs(penalty) <= _FLOAT_MAX
    return np.asarray(usable)


def _draw(
    logits: Array,
    temperature: Array,
    top_k: Array,
    top_p: Array,
    min_p: Array,
    seeds: Array,
    positions: Array,
) -> tuple[Array, Array]:
    """Return sampled ids and candidate counts of rows with a finite maximum."""
    with np.errstate(over="ignore"):
        scale = np.minimum(_LOG2_E / temperature, _FLOAT_MAX)[:, None]
        x = (logits - logits.max(axis=1, keepdims=True)) * scale  # log2(p / largest p)
    kept = x >= np.float32(-exact.MASS_BITS)
    if (min_p > 0).any():
        positive = np.maximum(min_p, np.finfo(np.float32).tiny)
        kept &= x >= np.where(min_p > 0, exact.log2(positive), -np.inf)[:, None]
    limit = np.where(top_k > 0, top_k, x.shape[1])
    if (limit < x.shape[1]).any() or (top_p < 1).any():
        kept &= _first_of_order(logits, x, kept, limit, top_p)
    num_kept = np.count_nonzero(kept, axis=1)
    if num_kept.sum() * 4 > kept.size:
        score = np.where(kept, x + gumbel_all(seeds, positions, x.shape[1]), -np.inf)
    else:
        rows, ids = np.nonzero(kept)
        score = np.full_like(x, -np.inf)
        score[rows, ids] = x[rows, ids] + gumbel(seeds[rows], positions[rows], ids)
    return np.argmax(score, axis=1), num_kept


def _first_of_order(
    logits: Array, x: Array, candidates: Array, limit: Array, top_p: Array
) -> Array:
    """Return the mask of each row's first candidates by (logit descending, id ascending): at most
    `limit`, and of these the fewest that reach `top_p` of their mass."""
    order = np.where(candidates, _order(logits), np.uint64(0))
    width = int(min(limit.max(), np.count_nonzero(candidates, axis=1).max()))
    best, ids = _largest(order, width)
    taken = (best > 0) & (np.arange(width) < limit[:, None])
    mass = np.where(taken, exact.mass(np.take_along_axis(x, ids, axis=1)), np.uint64(0))
    sums = np.cumsum(mass, axis=1, dtype=np.uint64)
    last = np.count_nonzero(sums < _share(sums[:, -1], top_p)[:, None], axis=1)
    return np.asarray(order >= np.take_along_axis(best, last[:, None], axis=1))


def _order(logits: Array) -> Array:
    """Return positive uint64 keys that compare like (logit ascending, id descending)."""
    reverse_ids = _ID_MASK - np.arange(logits.shape[1], dtype=np.uint64)
    return np.asarray((exact.ordered_key(logits).astype(np.uint64) << np.uint64(32)) | reverse_ids)


def _largest(order: Array, width: int) -> tuple[Array, Array]:
    """Return the `width` largest values of `order` per row, descending, and their ids."""
    if width < order.shape[1]:
        order = np.partition(order, order.shape[1] - width, axis=1)[:, order.shape[1] - width :]
    best = np.sort(order, axis=1)[:, ::-1]
    return best, np.where(best > 0, _ID_MASK - (best & _ID_MASK), np.uint64(0)).astype(np.int64)


def _share(total: Array, top_p: Array) -> Array:
    """Return ceil(top_p * total) without overflow; top_p is rounded up to steps of 2**-24."""
    steps = np.ceil(top_p * np.float32(2**24)).astype(np.uint64)
    bits = np.uint64(24)
    low = (total & np.uint64(2**24 - 1)) * steps + np.uint64(2**24 - 1)
    return np.asarray((total >> bits) * steps + (low >> bits))


def _result(
    logits: Array, token_ids: Array, status: Array, num_kept: Array, num_logprobs: int | None
) -> SampleResult:
    """Return the result with log-probabilities: log_softmax of the unprocessed logits."""
    if num_logprobs is None:
        return SampleResult(token_ids, status, None, None, None, num_kept)
    bad = (status != OK)[:, None]
    safe = np.where(bad, np.float32(0), logits)
    with np.errstate(over="ignore"):  # logits far below the maximum have probability 0
        below = safe - safe.max(axis=1, keepdims=True, initial=-np.inf)
    logprobs = below - np.log(np.exp(below).sum(axis=1, keepdims=True))
    chosen = np.take_along_axis(logprobs, np.maximum(token_ids, 0)[:, None], axis=1)
    chosen = np.where(bad, np.float32(np.nan), chosen)[:, 0]
    if num_logprobs == 0:
        return SampleResult(token_ids, status, chosen, None, None, num_kept)
    top_ids = _largest(_order(safe), num_logprobs)[1]
    top_logprobs = np.take_along_axis(logprobs, top_ids, axis=1)
    return SampleResult(
        token_ids,
        status,
        chosen,
        np.where(bad, -1, top_ids).astype(np.int32),
        np.where(bad, np.float32(np.nan), top_logprobs),
        num_kept,
    )
