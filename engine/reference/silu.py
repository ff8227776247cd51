"""NumPy mirror of `engine.kernels.silu`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.reference import _activation

__all__ = ["silu"]

Array = np.ndarray[Any, Any]


def silu(x: Array) -> Array:
    """x / (1 + exp(-x))."""
    return _activation.apply(_activation.silu, x)
