"""NumPy mirror of `engine.kernels.geglu`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.dtypes import accumulation_dtype
from engine.reference._activation import gelu_erf, gelu_tanh

__all__ = ["geglu"]

Array = np.ndarray[Any, Any]


def geglu(x: Array, *, approximate: str = "tanh") -> Array:
    """gelu(gate) * up, with x = [gate | up] along the last axis; rounded once."""
    gelu = gelu_tanh if approximate == "tanh" else gelu_erf
    gate, up = np.split(x.astype(accumulation_dtype(x.dtype), copy=False), 2, axis=-1)
    return np.asarray(gelu(gate) * up, x.dtype)
