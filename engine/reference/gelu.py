"""NumPy mirror of `engine.kernels.gelu`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.reference import _activation

__all__ = ["gelu"]

Array = np.ndarray[Any, Any]


def gelu(x: Array, *, approximate: str = "none") -> Array:
    """x (1 + erf(x / sqrt 2)) / 2, or its tanh approximation."""
    is_tanh = approximate == "tanh"
    return _activation.apply(_activation.gelu_tanh if is_tanh else _activation.gelu_erf, x)
