"""NumPy mirror of `engine.kernels.sigmoid_gate`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.dtypes import accumulation_dtype
from engine.reference import _activation

__all__ = ["sigmoid_gate"]

Array = np.ndarray[Any, Any]


def sigmoid_gate(x: Array, gate: Array) -> Array:
    """x / (1 + exp(-gate)), in float32 (float64 for float64), rounded once.

    With a gate per head (T, H), each is for F / H features of x.
    """
    real = accumulation_dtype(x.dtype)
    factor = _activation.sigmoid(gate.astype(real, copy=False))
    factor = np.repeat(factor, x.shape[1] // max(1, gate.shape[1]), axis=1)
    return np.asarray(x.astype(real, copy=False) * factor, x.dtype)
