"""NumPy mirror of `engine.kernels.scale_rows`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.dtypes import accumulation_dtype

__all__ = ["scale_rows"]

Array = np.ndarray[Any, Any]


def scale_rows(x: Array, factors: Array) -> Array:
    """out = x * factors, one factor per row or one for all."""
    return (x.astype(accumulation_dtype(x.dtype)) * factors[:, None]).astype(x.dtype)
