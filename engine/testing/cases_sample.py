"""Parameters and logits for the tests of `sample`: ordinary and corner cases."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["FILTERS", "LOGITS", "PROCESSING", "logits", "parameters", "processing"]

Array = np.ndarray[Any, Any]

_DTYPES: dict[str, Any] = {
    "temperature": np.float32,
    "top_k": np.int32,
    "top_p": np.float32,
    "min_p": np.float32,
    "seeds": np.uint64,
    "positions": np.int64,
}
_NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seeds": 0, "positions": 0}

# Name -> parameters; omitted ones are neutral.
FILTERS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "cold": {"temperature": 1e-5},
    "hot": {"temperature": 50.0},
    "top_k_1": {"top_k": 1},
    "top_k_50": {"top_k": 50},
    "top_k_65": {"top_k": 65},
    "top_k_1000": {"top_k": 1000},
    "top_k_beyond": {"top_k": 1 << 30},
    "top_p_90": {"top_p": 0.9},
    "cool_top_p": {"temperature": 0.6, "top_p": 0.95},
    "top_p_half": {"top_p": 0.5},
    "top_p_tiny": {"top_p": 1e-9},
    "min_p_10": {"min_p": 0.1},
    "min_p_one": {"min_p": 1.0},
    "top_k_top_p": {"top_k": 50, "top_p": 0.9},
    "all": {"temperature": 0.7, "top_k": 200, "top_p": 0.95, "min_p": 0.02},
}

LOGITS = ("normal", "flat", "sharp", "rounded", "equal", "zeros", "sorted", "sparse")
PROCESSING = ("bias", "mask", "masks_of_some", "penalties", "everything")


def parameters(num_rows: int, **values: Any) -> dict[str, Array]:
    """Return the six required arrays of `sample`; parameters not given are neutral.

    Examples
    --------
    >>> parameters(2, top_k=5)["top_k"]
    array([5, 5], dtype=int32)
    """
    return {
        name: np.broadcast_to(np.asarray(values.get(name, _NEUTRAL[name]), dtype), num_rows).copy()
        for name, dtype in _DTYPES.items()
    }


def logits(kind: str, num_rows: int, vocab_size: int, seed: int = 0) -> Array:
    """Return float32 rows (B, V) of a `kind` in `LOGITS`, determined by the arguments."""
    rng = np.random.default_rng([seed, num_rows, vocab_size, LOGITS.index(kind)])
    x: Array = rng.standard_normal((num_rows, vocab_size), np.float32) * np.float32(3)
    if kind == "flat":
        x *= np.float32(0.01)
    elif kind == "sharp":
        x *= np.float32(10)
    elif kind == "rounded":  # many ties, even at the thresholds
        x = np.round(x)
    elif kind == "equal":
        x[:] = 2.5
    elif kind == "zeros":  # zeros of both signs, which compare equal
        x = np.where(x > 0, np.float32(0.0), np.float32(-0.0))
    elif kind == "sorted":  # the large logits are adjacent
        x = -np.sort(-x, axis=1)
    elif kind == "sparse":  # only a few ids have a probability above 0
        kept: Any = rng.random(x.shape) < 0.1
        kept[:, vocab_size // 2] = True
        x = np.where(kept, x, np.float32(-np.inf))
    return x


def processing(kind: str, num_rows: int, vocab_size: int, seed: int = 0) -> dict[str, Array]:
    """Return the optional arrays of a `kind` in `PROCESSING`; the history repeats ids."""
    rng = np.random.default_rng([seed, num_rows, vocab_size])
    args: dict[str, Array] = {}
    if kind in ("bias", "everything"):
        counts = rng.integers(0, min(vocab_size, 9), num_rows)
        ids = [rng.choice(vocab_size, count, replace=False) for count in counts]
        args["cu_logit_bias"] = np.cumsum([0, *counts]).astype(np.int32)
        args["logit_bias_ids"] = np.concatenate([*ids, []]).astype(np.int32)
        args["logit_bias_values"] = rng.choice([1.0, -5.0, 7.5, -np.inf], counts.sum()).astype("f4")
    if kind in ("mask", "masks_of_some", "everything"):
        num_masks = num_rows if kind == "mask" else max(num_rows // 2, 1)
        bits = rng.random((num_masks, -(-vocab_size // 32) * 32)) < 0.5
        args["allowed"] = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
        if kind != "mask":
            args["allowed_rows"] = rng.integers(-1, num_masks, num_rows).astype(np.int32)
    if kind in ("penalties", "everything"):
        width = 40
        args["history"] = rng.integers(0, min(vocab_size, 25), (num_rows, width)).astype(np.int32)
        args["history_lens"] = rng.integers(0, width + 1, num_rows).astype(np.int32)
        args["prompt_lens"] = (args["history_lens"] // 2).astype(np.int32)
        args["repetition_penalty"] = rng.choice([1.0, 1.3, 0.5], num_rows).astype("f4")
        args["presence_penalty"] = rng.choice([0.0, 0.7, -0.5], num_rows).astype("f4")
        args["frequency_penalty"] = rng.choice([0.0, 0.3, -0.2], num_rows).astype("f4")
    return args
