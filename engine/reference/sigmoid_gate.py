"""NumPy mirror of `engine.kernels.sigmoid_gate`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.dtypes import accumulation_dtype
from engine.reference import _activation

__all__ = ["sigmoid_gate"]

Array = np.ndarray[Any, Any]


def sigmoid_gate(x: Array, gate: Array) -> Array:
    """x / (1 + exp(-gate)), in float32 (float64 for float64), rounded once."""
    real = accumulation_dtype(x.dtype)
    factor = _activation.sigmoid(gate.astype(real, copy=False))
    return np.asarray(x.astype(real, copy=False) * factor, x.dtype)
