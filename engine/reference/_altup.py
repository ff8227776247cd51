"""The router of alternating updates, for the mirrors of `altup_predict` and `altup_correct`."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.reference._row_by_row import multiply_row_by_row

__all__ = ["modalities"]

Array = np.ndarray[Any, Any]


def modalities(x: Array, router_norm: Array, router: Array, eps: float) -> Array:
    """tanh(router norm(x) / N), (T, S), in float32."""
    x = x.astype(np.float32)
    scale = 1 / np.sqrt(np.square(x).mean(axis=1, keepdims=True) + np.float32(eps))
    normed = x * scale * router_norm.astype(np.float32)
    scores = multiply_row_by_row(normed, router.astype(np.float32).T)
    return np.asarray(np.tanh(scores / np.float32(x.shape[1])))
