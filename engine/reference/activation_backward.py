"""NumPy mirror of `engine.kernels.activation_backward`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.dtypes import accumulation_dtype
from engine.reference import _activation

__all__ = ["activation_backward"]

Array = np.ndarray[Any, Any]

_SLOPES = {
    "silu": _activation.silu_slope,
    "gelu": _activation.gelu_erf_slope,
    "gelu_tanh": _activation.gelu_tanh_slope,
    "relu": _activation.relu_slope,
}


def activation_backward(dout: Array, x: Array, activation: str) -> Array:
    """dout * f'(x) for the activation f; rounded once."""
    real = accumulation_dtype(x.dtype)
    with np.errstate(invalid="ignore"):
        dx = dout.astype(real, copy=False) * _SLOPES[activation](x.astype(real, copy=False))
    return np.asarray(dx, x.dtype)
