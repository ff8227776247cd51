"""Logit lens: the next token that the residual stream after each layer would predict.

The final norm and the output layer read the residual stream after every layer, not only after the
last one (nostalgebraist, "interpreting GPT: the logit lens", 2020).
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from engine.cache.array_cache import Cache
from engine.cache.kv_cache import KVGeometry
from engine.checks import is_integer, shown
from engine.device import to_numpy
from engine.dtypes import np_dtype
from engine.errors import RequestError
from engine.layers.batch import ForwardBatch
from engine.layers.token_ids import checked_sequence
from engine.model import Model
from engine.tasks.embeddings import PassSize

__all__ = [
    "MAX_LENS_TOKENS",
    "MAX_TOKENS",
    "MAX_TOP",
    "LogitLens",
    "logit_lens",
    "logit_lens_in_parts",
    "num_lens_layers",
]

MAX_TOKENS = 4096
"""Maximum tokens of a sequence."""

MAX_LENS_TOKENS = 16
"""Maximum tokens of a sequence that are looked at."""

MAX_TOP = 20
"""Maximum predictions per layer."""

_BLOCK_SIZE = 16


@dataclass(frozen=True)
class LogitLens:
    """What each of L layers predicts in the place of each of M tokens.

    Attributes
    ----------
    token_ids : (M,) array of int32
        The tokens looked at, the last M of the sequence.
    ranks : (L, M) array of int32
        Rank of each token among the predictions of a layer; 1 is the likeliest.
    probabilities : (L, M) array of float32
        Probability of each token, at temperature 1.
    top_ids : (L, M, K) array of int32
        The K likeliest tokens, likeliest first.
    top_probabilities : (L, M, K) array of float32
    """

    token_ids: np.ndarray[Any, Any]
    ranks: np.ndarray[Any, Any]
    probabilities: np.ndarray[Any, Any]
    top_ids: np.ndarray[Any, Any]
    top_probabilities: np.ndarray[Any, Any]


def num_lens_layers(model: Any) -> int:
    """Return the number of layers that the lens reads; 0 if it does not support the model.

    Unsupported are models of several pipeline stages, each of which holds some of the layers, and
    layers with several residual streams (Gemma 3n).
    """
    is_supported = model.num_stages == 1 and model.config.altup is None
    return model.config.num_layers if is_supported else 0


def logit_lens(
    model: Model, token_ids: Sequence[int], num_tokens: int = 1, top: int = 5
) -> LogitLens:
    """Return what each layer predicts in the place of the last tokens of a sequence.

    Parameters
    ----------
    model : Model
    token_ids : sequence of int
        2 to `MAX_TOKENS` ids, and at most `model.max_model_len`.
    num_tokens : int
        Number of tokens to look at, at the end of the sequence: 1 to `MAX_LENS_TOKENS`. The first
        token of the sequence is none of them, as nothing predicts it.
    top : int
        Number of predictions per layer and token: 1 to `MAX_TOP`, and at most the vocabulary.

    Returns
    -------
    LogitLens

    Raises
    ------
    RequestError
        If an argument is invalid, or the model is not supported (`num_lens_layers`).

    Examples
    --------
    >>> from engine import load
    >>> from engine.config import ModelConfig
    >>> config = ModelConfig("llama", 64, 32, 3, 4, 2, 8, 48, 128)
    >>> model = load(config=config, load_format="dummy", device="cpu")
    >>> lens = logit_lens(model, [1, 2, 3, 4], num_tokens=2)
    >>> lens.token_ids, lens.top_ids.shape
    (array([3, 4], dtype=int32), (3, 2, 5))
    """
    *_, lens = logit_lens_in_parts(model, token_ids, num_tokens, top, has_others=False)
    assert lens is not None
    return lens


def logit_lens_in_parts(
    model: Model,
    token_ids: Sequence[int],
    num_tokens: int = 1,
    top: int = 5,
    *,
    has_others: bool = True,
) -> Generator[LogitLens | None, None, None]:
    """Yield None after each forward pass and each layer, then the lens; see `logit_lens`.

    An engine can serve other requests in between; with `has_others` the passes are short. The
    arguments are checked at once. Closing the generator frees its KV cache.
    """
    if not num_lens_layers(model):
        raise RequestError(f"the logit lens does not support {model.config.model_type} as loaded")
    ids = _checked(model, token_ids)
    _check_number("num_tokens", num_tokens, min(MAX_LENS_TOKENS, len(ids) - 1))
    _check_number("top", top, min(MAX_TOP, model.config.vocab_size))
    return _parts(model, ids, num_tokens, top, PassSize.of(model, has_others=has_others))


def _checked(model: Model, token_ids: Sequence[int]) -> Any:
    limit = min(MAX_TOKENS, model.max_model_len)
    count = len(token_ids) if hasattr(token_ids, "__len__") else 0
    if not 2 <= count <= limit:
        got = f"{count} tokens" if hasattr(token_ids, "__len__") else shown(token_ids)
        raise RequestError(f"token_ids must have 2 to {limit} tokens for the logit lens; got {got}")
    return checked_sequence(token_ids, model.config.vocab_size)


def _check_number(name: str, value: Any, limit: int) -> None:
    if not is_integer(value) or not 1 <= value <= limit:
        raise RequestError(f"{name} must be an integer in [1, {limit}]; got {shown(value)}")


def _parts(
    model: Model, ids: Any, num_tokens: int, top: int, size: PassSize
) -> Generator[LogitLens | None, None, None]:
    last = len(ids) - 1  # the last token is looked at, but predicts nothing that is
    first = last - num_tokens
    num_layers = model.config.num_layers
    geometry = KVGeometry.of_model(model.config, model.dtype, _BLOCK_SIZE)
    shape = num_tokens, model.config.hidden_size
    dtype = np_dtype(model.dtype)
    # Layer -> the residual stream that enters it: after the last layer, the final norm's input.
    streams = {i + 1: model.device.xp.empty(shape, dtype) for i in range(num_layers)}
    with closing(model.make_cache(geometry, 1, -(-last // _BLOCK_SIZE) * _BLOCK_SIZE)) as cache:
        start = 0
        while start < first:
            stop = min(first, start + size.num_tokens)
            begin = time.monotonic()
            to_numpy(model.hidden_states(_batch(model, cache, ids, start, stop), cache.pages))
            size.note(stop - start, time.monotonic() - begin)
            yield None
            start = stop
        batch = replace(_batch(model, cache, ids, first, last), features=streams)
        model.hidden_states(batch, cache.pages)
    rows = []
    for stream in streams.values():
        yield None
        rows.append(_row(to_numpy(model.read_residual(stream)), ids[first + 1 :], top))
    ranks, probabilities, top_ids, top_probabilities = map(np.stack, zip(*rows, strict=True))
    yield LogitLens(
        ids[first + 1 :].astype(np.int32), ranks, probabilities, top_ids, top_probabilities
    )


def _batch(model: Model, cache: Cache, ids: Any, start: int, stop: int) -> ForwardBatch:
    """Return the batch of positions [start, stop) of a sequence alone in its cache."""
    batch = ForwardBatch.build(
        [ids[start:stop]],
        [start],
        [range(-(-stop // _BLOCK_SIZE))],
        _BLOCK_SIZE,
        logits="last",
        rope_offset=model.decoder.rope_offsets([len(ids) - 1]),
        state_slots=cache.state_slots,
    )
    return batch.to(model.device)


def _row(logits: Any, token_ids: Any, top: int) -> tuple[Any, Any, Any, Any]:
    """Return ranks, probabilities and the likeliest tokens of one layer, from its logits (M, V)."""
    own = np.take_along_axis(logits, token_ids[:, None].astype(np.int64), axis=1)
    ranks = 1 + np.count_nonzero(logits > own, axis=1)
    highest = logits.max(axis=1, keepdims=True)
    total = np.exp(logits - highest).sum(axis=1, keepdims=True)
    best = np.argpartition(-logits, top - 1, axis=1)[:, :top]
    scores = np.take_along_axis(logits, best, axis=1)
    order = np.argsort(-scores, axis=1, kind="stable")
    best = np.take_along_axis(best, order, axis=1)
    scores = np.take_along_axis(scores, order, axis=1)
    return (
        ranks.astype(np.int32),
        (np.exp(own - highest) / total)[:, 0],
        best.astype(np.int32),
        np.exp(scores - highest) / total,
    )
