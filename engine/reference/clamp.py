"""NumPy mirror of `engine.kernels.clamp`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.dtypes import accumulation_dtype

__all__ = ["clamp"]

Array = np.ndarray[Any, Any]


def clamp(x: Array, low: float, high: float) -> Array:
    """min(max(x, low), high); NaN stays NaN."""
    real = accumulation_dtype(x.dtype)
    return np.asarray(np.clip(x.astype(real, copy=False), real.type(low), real.type(high)), x.dtype)
