"""NumPy mirror of `engine.kernels.gemm_int8`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.reference._products import multiply_8bit

__all__ = ["gemm_int8"]

Array = np.ndarray[Any, Any]


def gemm_int8(
    x: Array,
    weight: Array,
    weight_scales: Array,
    *,
    x_scales: Array | None = None,
    norm_weight: Array | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    bias: Array | None = None,
    residual: Array | None = None,
    activation: str | None = None,
    out_dtype: Any = None,
) -> Array:
    """y = activation((xq weight^T) * x_scales * weight_scales + bias) + residual, in float32.

    xq is `x` with `x_scales`, or else quantize_rows of x, or of rmsnorm(x) with a `norm_weight`;
    x_scales are of groups of 128 columns. The sum of a group is exact, and is added in float32.
    """
    norm = norm_weight, eps, weight_offset
    return multiply_8bit(
        "int8",
        x,
        weight,
        weight_scales,
        x_scales,
        norm,
        bias,
        residual,
        activation,
        out_dtype,
    )
