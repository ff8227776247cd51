"""NumPy mirror of `engine.kernels.match_rms`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["match_rms"]

Array = np.ndarray[Any, Any]


def match_rms(x: Array, target: Array, *, least: float = 1e-5) -> Array:
    """x rms(target) / rms(x), row by row, with the mean square of x at least `least`."""

    def mean_square(rows: Array) -> Array:
        return np.asarray(np.square(rows.astype(np.float32)).mean(axis=-1, keepdims=True))

    ratio = np.sqrt(mean_square(target)) / np.sqrt(np.maximum(mean_square(x), np.float32(least)))
    return np.asarray((x.astype(np.float32) * ratio).astype(x.dtype))
