"""NumPy mirror of `engine.kernels.swiglu_backward`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.reference._activation import gated_backward, silu, silu_slope

__all__ = ["swiglu_backward"]

Array = np.ndarray[Any, Any]


def swiglu_backward(dout: Array, x: Array) -> Array:
    """[dout * up * silu'(gate) | dout * silu(gate)], with x = [gate | up]; rounded once."""
    return gated_backward(dout, x, silu, silu_slope)
