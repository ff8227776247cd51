"""KV cache quantization scales, calibrated on the keys and values of sample sequences.

Scales are fixed before the first request. Pages are shared by prefix, swapped, and recomputed after
a preemption; adapting scales to the tokens would change the meaning of codes already stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from os import PathLike
from typing import Any

import numpy as np

from engine.config import ModelConfig
from engine.dtypes import KV_CODE_DTYPES
from engine.errors import RequestError
from engine.layers.token_ids import checked_sequence
from engine.loading.kv_scales import read_kv_scales
from engine.models.kv_scales import KVScales

__all__ = [
    "MARGIN",
    "calibrate",
    "checked_sequences",
    "ensure_scales",
    "fixed_sequences",
    "peaks",
    "take_checkpoint_scales",
]

MARGIN = 1.25
"""Headroom above the peaks of `fixed_sequences`: real text and later positions exceed them."""

_SEQUENCES = 4
_TOKENS = 256


def peaks(model: Any, sequences: Sequence[Sequence[int]]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the largest magnitude of keys and values per layer and head, (num_layers, 2, K).

    Parameters
    ----------
    model : Model
    sequences : sequence of sequences of int

    Raises
    ------
    RequestError
        If there are no sequences, a sequence is empty or longer than the model supports, or an id
        is outside [0, V).
    """
    found = []
    for ids in checked_sequences(model, sequences):
        with closing(model.new_cache(1, len(ids))) as cache:
            model.step([ids], cache)
            found.append(cache.peaks())
    largest: np.ndarray[Any, np.dtype[np.float32]] = np.max(found, axis=0)
    return largest


def checked_sequences(model: Any, sequences: Sequence[Sequence[int]]) -> list[Any]:
    """Validate the sequences (see `peaks`) and return them as int32 arrays."""
    if not len(sequences):
        raise RequestError("token_ids must hold at least one sequence; got none")
    for index, ids in enumerate(sequences):
        if not 1 <= len(ids) <= model.max_model_len:
            limit = model.max_model_len
            raise RequestError(f"token_ids[{index}] must have 1 to {limit} tokens; got {len(ids)}")
    vocab = model.config.vocab_size
    return [checked_sequence(ids, vocab, f"token_ids[{i}]") for i, ids in enumerate(sequences)]


def fixed_sequences(config: ModelConfig, max_model_len: int) -> list[list[int]]:
    """Return random token ids, determined by the arguments; each sequence starts with BOS, if any.

    Examples
    --------
    >>> config = ModelConfig("llama", 64, 32, 1, 4, 2, 8, 48, 128)
    >>> [len(ids) for ids in fixed_sequences(config, 100)]
    [100, 100, 100, 100]
    """
    shape = (_SEQUENCES, min(_TOKENS, max_model_len))
    ids = np.random.default_rng(0).integers(0, config.vocab_size, shape)
    if config.bos_token_id is not None:
        ids[:, 0] = config.bos_token_id
    return [[int(i) for i in row] for row in ids]


def calibrate(model: Any, scales: KVScales, sequences: Sequence[Sequence[int]]) -> None:
    """Set the scales of all KV cache formats from the `peaks` of the sequences."""
    found = peaks(model, sequences)
    for codes in KV_CODE_DTYPES:
        scales.set_peaks(found, codes, "set by calibrate_kv_scales")


def take_checkpoint_scales(
    scales: KVScales,
    source: str | PathLike[str],
    config: ModelConfig,
    heads: slice = slice(None),
    layers: slice = slice(None),
) -> None:
    """Set the KV cache scales found in a checkpoint, for the given heads and layers.

    See `read_kv_scales`. Missing e4m3 scales default to 1. If none is missing, the int8 scales are
    derived from them, unless all are 1, which means uncalibrated. Stored int8 scales are used only
    under the same conditions.
    """
    if (found := read_kv_scales(source, config)) is None:
        return
    values, codes = found
    missing = np.isnan(values)
    is_calibrated = not missing.any() and bool((values != 1).any())
    if codes == "fp8" or is_calibrated:
        also_others = codes == "fp8" and is_calibrated
        values = np.where(missing, np.float32(1), values)
        values = values[layers, :, heads]
        scales.set(values, codes, "those of the checkpoint", also_others=also_others)


def ensure_scales(model: Any, scales: KVScales, codes: str) -> str:
    """Calibrate the int8 scales still unset; return the source of the scales for `codes`."""
    if not scales.sources[codes]:
        if codes == "fp8":
            return "1: neither the checkpoint nor calibrate_kv_scales gave any"
        sequences = fixed_sequences(model.config, model.max_model_len)
        count = sum(map(len, sequences))
        source = f"measured on {count} random tokens, times {MARGIN:g}"
        scales.set_peaks(peaks(model, sequences) * np.float32(MARGIN), codes, source)
    return scales.sources[codes]
