"""NumPy mirror of `engine.kernels.swiglu`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.dtypes import accumulation_dtype
from engine.reference._activation import silu

__all__ = ["swiglu"]

Array = np.ndarray[Any, Any]


def swiglu(x: Array) -> Array:
    """silu(gate) * up, with x = [gate | up] along the last axis; rounded once."""
    gate, up = np.split(x.astype(accumulation_dtype(x.dtype), copy=False), 2, axis=-1)
    return np.asarray(silu(gate) * up, x.dtype)
