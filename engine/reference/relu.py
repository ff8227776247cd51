"""NumPy mirror of `engine.kernels.relu`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.dtypes import accumulation_dtype
from engine.reference import _activation

__all__ = ["relu"]

Array = np.ndarray[Any, Any]


def relu(x: Array, *, squared: bool = False, gated: bool = False) -> Array:
    """max(x, 0), or its square; NaN stays NaN. `gated`: of rows [gate | up], times up."""
    activation = _activation.relu_squared if squared else _activation.relu
    if gated:
        gate, up = np.split(x.astype(accumulation_dtype(x.dtype), copy=False), 2, axis=-1)
        return np.asarray(activation(gate) * up, x.dtype)
    return _activation.apply(activation, x)
