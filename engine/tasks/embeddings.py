"""Text embeddings: the pooled output of a model's final norm."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from typing import Any

import numpy as np

from engine.cache.array_cache import Cache
from engine.cache.kv_cache import KVGeometry
from engine.checks import items_of, shown_with_type
from engine.device import to_numpy
from engine.errors import ContextLengthError, RequestError
from engine.layers.batch import ForwardBatch
from engine.layers.token_ids import checked_sequence
from engine.model import Model

__all__ = ["CLASSIFY", "POOLINGS", "PassSize", "embed", "embed_in_parts"]

POOLINGS = ("last", "mean")
CLASSIFY = "classify"
"""Pooling of `embed_in_parts` that returns the scores of the model's classification head."""

_BLOCK_SIZE = 16
_MAX_SEQUENCES = 1 << 20  # maximum sequences per call
_MAX_TOKENS = {"cpu": 512, "cuda": 2048}  # maximum tokens per forward pass
_FIRST_TOKENS = {"cpu": 32, "cuda": 512}  # tokens of the first pass, if others wait for its end
_PASS_SECONDS = 0.25  # duration of later ones

_Vector = np.ndarray[Any, np.dtype[np.float32]]
_Chunk = tuple[int, int, int]
"""(sequence index, start, stop)."""


def embed(
    model: Model,
    token_ids: Sequence[Sequence[int]],
    pooling: str | None = None,
    *,
    normalize: bool = True,
) -> list[_Vector]:
    """Return one embedding per sequence.

    Parameters
    ----------
    model : Model
    token_ids : sequence of sequences of int
        1 to `model.max_model_len` ids per sequence.
    pooling : str, optional
        How to pool the final norm's outputs: take the "last" token's, or the "mean" over all
        tokens. By default as the model's files say, or "last": see `Model.pooling`.
    normalize : bool
        Divide by the Euclidean norm; zero vectors stay zero.

    Returns
    -------
    list of (N,) array of float32
        On the host; N is the model's hidden size.

    Raises
    ------
    RequestError
        If an argument is invalid.

    Examples
    --------
    >>> from engine import load
    >>> from engine.config import ModelConfig
    >>> config = ModelConfig("llama", 64, 32, 1, 4, 2, 8, 48, 128)
    >>> model = load(config=config, load_format="dummy", device="cpu")
    >>> [v.shape for v in embed(model, [[1, 2, 3], [4]], pooling="mean")]
    [(32,), (32,)]
    """
    found: dict[int, _Vector] = {}
    for part in embed_in_parts(model, token_ids, pooling, normalize=normalize):
        found.update(part)
    return [found[index] for index in range(len(token_ids))]


def embed_in_parts(
    model: Model,
    token_ids: Sequence[Sequence[int]],
    pooling: str | None = None,
    *,
    normalize: bool = True,
    has_others: bool = False,
) -> Generator[dict[int, _Vector], None, None]:
    """Yield after each forward pass the embeddings it completes, keyed by sequence index.

    An engine can serve other requests between the passes; with `has_others`, these have as many
    tokens as can be computed in a quarter of a second (a fixed number if the model is
    deterministic). Arguments and errors as for `embed`; the arguments are checked at once. Closing
    the generator frees its KV cache. With the pooling `CLASSIFY` an embedding is the scores of the
    labels, (L,).
    """
    if pooling is None:
        pooling = model.pooling
    if pooling == CLASSIFY and model.classifier is None:
        raise RequestError(f"{model.name} has no classification head")
    if not isinstance(pooling, str) or pooling not in (*POOLINGS, CLASSIFY):
        wanted = " or ".join(map(repr, POOLINGS))
        raise RequestError(f"pooling must be {wanted}; got {shown_with_type(pooling)}")
    if not isinstance(normalize, bool):
        raise RequestError(f"normalize must be True or False; got {shown_with_type(normalize)}")
    sequences = items_of("token_ids", token_ids, "sequences of token ids", _MAX_SEQUENCES)
    rows = [_checked(model, index, ids) for index, ids in enumerate(sequences)]
    return _parts(model, rows, pooling, normalize, PassSize.of(model, has_others=has_others))


class PassSize:
    """Number of tokens of the next forward pass.

    Parameters
    ----------
    most : int
    first : int, optional
        Tokens of the first pass; `most` by default.
    is_fixed : bool
        Whether it stays; otherwise it follows the speed, aiming at `_PASS_SECONDS`.
    """

    def __init__(self, most: int, first: int | None = None, *, is_fixed: bool = True) -> None:
        self.most = most
        self.num_tokens = most if first is None else min(first, most)
        self._is_fixed = is_fixed

    @classmethod
    def of(cls, model: Model, *, has_others: bool) -> PassSize:
        """Return the size for a model; with `has_others`, requests wait for the end of a pass."""
        kind = model.device.kind
        if not has_others:
            return cls(_MAX_TOKENS[kind])
        return cls(_MAX_TOKENS[kind], _FIRST_TOKENS[kind], is_fixed=model.deterministic)

    def note(self, num_tokens: int, seconds: float) -> None:
        """Record the duration of a pass."""
        if not self._is_fixed:
            wanted = int(num_tokens * _PASS_SECONDS / max(seconds, 1e-6))
            self.num_tokens = min(max(wanted, _BLOCK_SIZE), 2 * self.num_tokens, self.most)


def _checked(model: Model, index: int, ids: Sequence[int]) -> Any:
    limit = model.max_model_len
    if not hasattr(ids, "__len__") or not 1 <= len(ids) <= limit:
        if hasattr(ids, "__len__") and len(ids) > limit:
            raise ContextLengthError.of("input", len(ids), limit, num_reserved=0)
        got = f"{len(ids)} tokens" if hasattr(ids, "__len__") else shown_with_type(ids)
        raise RequestError(f"token_ids[{index}] must have 1 to {limit} tokens; got {got}")
    return checked_sequence(ids, model.config.vocab_size, f"token_ids[{index}]")


def _parts(
    model: Model, rows: list[Any], pooling: str, normalize: bool, size: PassSize
) -> Generator[dict[int, _Vector], None, None]:
    lengths = [len(row) for row in rows]
    if not lengths:
        return
    sums: dict[int, _Vector] = {}
    geometry = KVGeometry.of_model(model.config, model.dtype, _BLOCK_SIZE)
    num_blocks = _most_blocks(lengths, size.most)
    with closing(model.make_cache(geometry, 1, num_blocks * _BLOCK_SIZE)) as cache:
        for batch in _batches(lengths, size):
            begin = time.monotonic()
            outputs = _hidden(model, cache, rows, batch, pooling)
            size.note(sum(stop - start for _, start, stop in batch), time.monotonic() - begin)
            done: dict[int, _Vector] = {}
            for (index, _, stop), total in zip(batch, outputs, strict=True):
                sums[index] = sums.get(index, np.float32(0)) + total
                if stop == len(rows[index]):
                    vector = sums.pop(index)
                    if pooling == CLASSIFY:
                        done[index] = model.classifier.scores(vector)  # type: ignore[union-attr]
                        continue
                    done[index] = _finished(vector, stop if pooling == "mean" else 1, normalize)
            yield done


def _batches(lengths: Sequence[int], size: PassSize) -> Iterator[list[_Chunk]]:
    """Yield the chunks of each forward pass: whole sequences, or one chunk of a long sequence.

    Shortest sequences first: a `ForwardBatch` must put single tokens before longer chunks.
    """
    waiting = deque(sorted(range(len(lengths)), key=lengths.__getitem__))
    start = 0
    while waiting:
        left = size.num_tokens
        length = lengths[waiting[0]]
        if start or length > left:
            stop = min(length, start + left)
            yield [(waiting[0], start, stop)]
            start = stop
            if stop == length:
                waiting.popleft()
                start = 0
            continue
        batch: list[_Chunk] = []
        while waiting and lengths[waiting[0]] <= left:
            index = waiting.popleft()
            left -= lengths[index]
            batch.append((index, 0, lengths[index]))
        yield batch


def _most_blocks(lengths: Sequence[int], limit: int) -> int:
    """Return the most blocks that a forward pass of at most `limit` tokens can need.

    Examples
    --------
    >>> _most_blocks([16, 1, 17], 32), _most_blocks([40], 16), _most_blocks([1, 1, 1], 2)
    (2, 3, 2)
    """
    most = -(-max(lengths) // _BLOCK_SIZE)
    run: deque[int] = deque()  # neighbors in the order of `_batches`
    num_tokens = num_blocks = 0
    for length in sorted(lengths):
        run.append(length)
        num_tokens += length
        num_blocks += -(-length // _BLOCK_SIZE)
        while num_tokens > limit:
            first = run.popleft()
            num_tokens -= first
            num_blocks -= -(-first // _BLOCK_SIZE)
        most = max(most, num_blocks)
    return most


def _hidden(
    model: Model, cache: Cache, rows: list[Any], batch: list[_Chunk], pooling: str
) -> list[_Vector]:
    """Compute the chunks; return the summed (or last) output of each, (N,) float32."""
    tables = []
    first = 0
    for _, _, stop in batch:
        count = -(-stop // _BLOCK_SIZE)
        tables.append(range(first, first + count))
        first += count
    flat = ForwardBatch.build(
        [rows[index][start:stop] for index, start, stop in batch],
        [start for _, start, _ in batch],
        tables,
        _BLOCK_SIZE,
        logits="all" if pooling == "mean" else "last",
        rope_offset=model.decoder.rope_offsets([len(rows[index]) for index, _, _ in batch]),
        state_slots=_state_slots(cache, len(batch)),
    )
    outputs = to_numpy(model.hidden_states(flat.to(model.device), cache.pages)).astype(np.float32)
    if pooling == "mean":
        starts = np.cumsum([0, *(stop - start for _, start, stop in batch[:-1])])
        return list(np.add.reduceat(outputs, starts, axis=0))
    is_last = [stop == len(rows[index]) for index, _, stop in batch]
    return [row if last else np.zeros_like(row) for row, last in zip(outputs, is_last, strict=True)]


def _state_slots(cache: Cache, num_sequences: int) -> np.ndarray[Any, Any] | None:
    """Return the state slots of a pass: only the chunks of a long sequence leave a state."""
    if num_sequences == 1 or cache.state_slots is None:
        return cache.state_slots
    return np.full(num_sequences, -1, np.int32)


def _finished(total: _Vector, count: int, normalize: bool) -> _Vector:
    vector: _Vector = total / np.float32(count)
    length = float(np.linalg.norm(vector))
    if normalize and length:
        vector /= np.float32(length)
    return vector
