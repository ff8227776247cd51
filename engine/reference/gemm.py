"""NumPy mirror of `engine.kernels.gemm`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.reference import _activation

__all__ = ["gemm"]

Array = np.ndarray[Any, Any]

_ACTIVATIONS = {
    "silu": _activation.silu,
    "gelu": _activation.gelu_erf,
    "gelu_tanh": _activation.gelu_tanh,
    "relu": _activation.relu,
}


def gemm(
    x: Array,
    weight: Array,
    *,
    bias: Array | None = None,
    residual: Array | None = None,
    activation: str | None = None,
    out_dtype: Any = None,
) -> Array:
    """y = activation(x W^T + bias) + residual, in float32, rounded once."""
    y: Array = x.astype(np.float32, copy=False) @ weight.astype(np.float32, copy=False).T
    if bias is not None:
        y += bias.astype(np.float32, copy=False)
    if activation is not None:
        y = _ACTIVATIONS[activation](y)
    if residual is not None:
        y += residual.astype(np.float32, copy=False)
    return y.astype(x.dtype if out_dtype is None else out_dtype, copy=False)
