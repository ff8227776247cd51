"""NumPy mirror of `engine.kernels.geglu`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.dtypes import accumulation_dtype
from engine.reference._activation import gelu_erf, gelu_tanh

__all__ = ["geglu"]

Array = np.ndarray[Any, Any]


def geglu(x: Array, *, up: Array | None = None, approximate: str = "tanh") -> Array:
    """gelu(gate) * up, with x = [gate | up] along the last axis, or x the gate; rounded once."""
    gelu = gelu_tanh if approximate == "tanh" else gelu_erf
    gate, factor = np.split(x, 2, axis=-1) if up is None else (x, up)
    real = accumulation_dtype(x.dtype)
    product = gelu(gate.astype(real, copy=False)) * factor.astype(real, copy=False)
    return np.asarray(product, x.dtype)
