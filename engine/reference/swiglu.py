"""NumPy mirror of `engine.kernels.swiglu`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.dtypes import accumulation_dtype
from engine.reference._activation import silu

__all__ = ["swiglu"]

Array = np.ndarray[Any, Any]


def swiglu(x: Array, *, up: Array | None = None) -> Array:
    """silu(gate) * up, with x = [gate | up] along the last axis, or x the gate; rounded once."""
    gate, factor = np.split(x, 2, axis=-1) if up is None else (x, up)
    real = accumulation_dtype(x.dtype)
    product = silu(gate.astype(real, copy=False)) * factor.astype(real, copy=False)
    return np.asarray(product, x.dtype)
