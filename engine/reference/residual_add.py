"""NumPy mirror of `engine.kernels.residual_add`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["residual_add"]

Array = np.ndarray[Any, Any]


def residual_add(x: Array, residual: Array, *, scale: Array | None = None) -> Array:
    """x + residual, times scale if given, in float32, rounded once."""
    total = x.astype(np.float32, copy=False) + residual.astype(np.float32, copy=False)
    if scale is not None:
        total = total * scale.astype(np.float32, copy=False)
    return np.asarray(total, x.dtype)
