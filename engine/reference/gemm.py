"""NumPy mirror of `engine.kernels.gemm`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["gemm"]

Array = np.ndarray[Any, Any]


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
    y = x.astype(np.float32, copy=False) @ weight.astype(np.float32, copy=False).T
    if bias is not None:
        y += bias.astype(np.float32, copy=False)
    y = _activate(y, activation)
    if residual is not None:
        y += residual.astype(np.float32, copy=False)
    return y.astype(x.dtype if out_dtype is None else out_dtype, copy=False)


def _activate(y: Array, activation: str | None) -> Array:
    from engine import reference

    if activation is None:
        return y
    if activation == "gelu_tanh":
        return reference.gelu(y, approximate="tanh")
    return {"silu": reference.silu, "gelu": reference.gelu, "relu": reference.relu}[activation](y)
