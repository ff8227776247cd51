"""NumPy mirror of `engine.kernels.xielu`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.dtypes import accumulation_dtype

__all__ = ["xielu"]

Array = np.ndarray[Any, Any]


def xielu(x: Array, coefficients: Array) -> Array:
    """a_p x^2 + b x for x > 0, else a_n (expm1(min(x, eps)) - x) + b x; rounded once."""
    positive, negative, slope, eps = coefficients
    real = x.astype(accumulation_dtype(x.dtype), copy=False)
    with np.errstate(over="ignore", invalid="ignore"):
        curve = negative * (np.expm1(np.minimum(real, eps)) - real)
        y = np.where(real > 0, positive * real * real, curve) + slope * real
    return np.asarray(y, x.dtype)
