"""NumPy mirror of `engine.kernels.permute_columns`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["permute_columns"]

Array = np.ndarray[Any, Any]


def permute_columns(x: Array, permutation: Array) -> Array:
    """y[m, k] = x[m, permutation[k]], or 0 if that index is outside x."""
    inside = (permutation >= 0) & (permutation < x.shape[1])
    y: Array = np.zeros((len(x), len(permutation)), x.dtype)
    y[:, inside] = x[:, permutation[inside]]
    return y
