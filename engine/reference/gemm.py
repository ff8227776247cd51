"""NumPy mirror of `engine.kernels.gemm`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.reference import _activation
from engine.reference.swiglu import swiglu

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
    deterministic: bool = False,
) -> Array:
    """y = activation(x W^T + bias) + residual, in float32, rounded once.

    "swiglu": silu(gate) * up, of the columns' first half and their second. "silu_and_mul": of each
    16 columns eight are the gate and eight are up.
    """
    multiply = _row_by_row if deterministic else _multiply
    y: Array = multiply(x.astype(np.float32, copy=False), weight.astype(np.float32, copy=False).T)
    if bias is not None:
        y += bias.astype(np.float32, copy=False)
    if activation == "swiglu":
        y = swiglu(y)
    elif activation == "silu_and_mul":
        y = silu_and_mul(y)
    elif activation is not None:
        y = _ACTIVATIONS[activation](y)
    if residual is not None:
        y += residual.astype(np.float32, copy=False)
    return y.astype(x.dtype if out_dtype is None else out_dtype, copy=False)


def silu_and_mul(y: Array) -> Array:
    """Make one column of those of gate and up, which come eight and eight."""
    blocks = y.reshape(len(y), y.shape[1] // 16, 2, 8)
    product: Array = _activation.silu(blocks[:, :, 0]) * blocks[:, :, 1]
    return product.reshape(len(y), y.shape[1] // 2)


def _multiply(x: Array, matrix: Array) -> Array:
    """Multiply; for few rows BLAS takes half the time if the weight comes first."""
    if 16 * len(x) <= matrix.shape[1]:
        return np.ascontiguousarray(np.matmul(matrix.T, x.T).T)
    y: Array = np.matmul(x, matrix)
    return y


def _row_by_row(x: Array, matrix: Array) -> Array:
    """Multiply each row by itself: in a product of many, BLAS sums a row by where it stands."""
    y: Array = np.matmul(x[:, None, :], matrix)[:, 0]
    return y
