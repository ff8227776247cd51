"""NumPy mirror of `engine.kernels.relu`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.reference import _activation

__all__ = ["relu"]

Array = np.ndarray[Any, Any]


def relu(x: Array) -> Array:
    """max(x, 0); NaN stays NaN."""
    return _activation.apply(_activation.relu, x)
