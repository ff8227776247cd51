"""NumPy mirror of `engine.kernels.cross_entropy`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.dtypes import accumulation_dtype

__all__ = ["cross_entropy"]

Array = np.ndarray[Any, Any]


@np.errstate(invalid="ignore", divide="ignore", over="ignore")
def cross_entropy(
    logits: Array,
    target: Array,
    *,
    ignore_index: int = -100,
    softcap: float = 0.0,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    dloss: Array | None = None,
) -> Any:
    """loss = (1 - smoothing) (lse - x_target) + smoothing (lse - mean(x)) + z_loss lse^2."""
    dtype = accumulation_dtype(logits.dtype)
    x = logits.astype(dtype)
    if softcap:
        x = np.tanh(x / dtype.type(softcap)) * dtype.type(softcap)
    vocab = x.shape[1]
    rows = np.arange(len(x))
    is_known = (target >= 0) & (target < vocab)
    column = np.where(is_known, target, 0)
    x_target = np.where(is_known, x[rows, column], dtype.type(np.nan))

    largest = x.max(axis=1)
    powers = np.exp(x - np.where(largest == -np.inf, dtype.type(0), largest)[:, None])
    total = powers.sum(axis=1)
    lse = largest + np.log(total)
    loss = np.log(total) + (largest - x_target)
    if label_smoothing:
        loss += dtype.type(label_smoothing) * (x_target - x.mean(axis=1))
    loss += dtype.type(z_loss) * lse * lse
    is_ignored = target == ignore_index
    results = [np.where(is_ignored, dtype.type(0), values) for values in (loss, lse)]
    if dloss is None:
        return tuple(results)

    dloss = np.where(is_known, dloss, dtype.type(np.nan))
    dx = powers * (dloss * (1 + dtype.type(2 * z_loss) * lse) / total)[:, None]
    dx -= (dloss * dtype.type(label_smoothing / vocab))[:, None]
    dx[rows, column] -= dloss * dtype.type(1 - label_smoothing)
    if softcap:
        dx *= 1 - np.square(x / dtype.type(softcap))
    dx[is_ignored] = 0
    return *results, dx.astype(logits.dtype)
