"""NumPy mirror of `engine.kernels.gaussian_topk`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["gaussian_topk"]

Array = np.ndarray[Any, Any]


def gaussian_topk(x: Array, factor: float) -> Array:
    """max(x - (mean + factor std), 0), with the mean and standard deviation of each row."""
    rows = x.astype(np.float32)
    mean = rows.mean(axis=-1, keepdims=True)
    deviation = np.sqrt(np.square(rows - mean).mean(axis=-1, keepdims=True))
    return np.asarray(np.maximum(rows - (mean + np.float32(factor) * deviation), 0), x.dtype)
