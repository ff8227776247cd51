"""NumPy mirror of `engine.kernels.relu`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.reference import _activation

__all__ = ["relu"]

Array = np.ndarray[Any, Any]


def relu(x: Array, *, squared: bool = False) -> Array:
    """max(x, 0), or its square; NaN stays NaN."""
    activation = _activation.relu_squared if squared else _activation.relu
    return _activation.apply(activation, x)
