"""NumPy mirror of `engine.kernels.gemm`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.reference import _activation
from engine.reference._row_by_row import multiply_row_by_row
from engine.reference.swiglu import swiglu

__all__ = ["epilogue", "gemm"]

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

    "swiglu": silu(gate) * up; gate is the first half of the columns, up the second half.
    "silu_and_mul": the same, but gate and up columns alternate in groups of eight.
    """
    multiply = multiply_row_by_row if deterministic else _multiply
    y: Array = multiply(x.astype(np.float32, copy=False), weight.astype(np.float32, copy=False).T)
    y = epilogue(y, bias, residual, activation)
    return y.astype(x.dtype if out_dtype is None else out_dtype, copy=False)


def epilogue(y: Array, bias: Array | None, residual: Array | None, activation: str | None) -> Array:
    """Return activation(y + bias) + residual, in float32; `y` may be overwritten."""
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
    return y


def silu_and_mul(y: Array) -> Array:
    """Return silu(gate) * up for gate and up columns that alternate in groups of eight."""
    blocks = y.reshape(len(y), y.shape[1] // 16, 2, 8)
    product: Array = _activation.silu(blocks[:, :, 0]) * blocks[:, :, 1]
    return product.reshape(len(y), y.shape[1] // 2)


def _multiply(x: Array, matrix: Array) -> Array:
    """Return x @ matrix; for few rows BLAS is twice as fast with the weight as first operand."""
    if 16 * len(x) <= matrix.shape[1]:
        return np.ascontiguousarray(np.matmul(matrix.T, x.T).T)
    y: Array = np.matmul(x, matrix)
    return y
