"""NumPy mirror of `engine.kernels.geglu_backward`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.reference import _activation

__all__ = ["geglu_backward"]

Array = np.ndarray[Any, Any]


def geglu_backward(dout: Array, x: Array, *, approximate: str = "tanh") -> Array:
    """[dout * up * gelu'(gate) | dout * gelu(gate)], with x = [gate | up]; rounded once."""
    if approximate == "tanh":
        functions = (_activation.gelu_tanh, _activation.gelu_tanh_slope)
    else:
        functions = (_activation.gelu_erf, _activation.gelu_erf_slope)
    return _activation.gated_backward(dout, x, *functions)
