"""NumPy mirror of `engine.kernels.gemm_fp8`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.reference._products import multiply_8bit

__all__ = ["gemm_fp8"]

Array = np.ndarray[Any, Any]


def gemm_fp8(
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

    xq is `x` if `x_scales` are given, else quantize_rows(x), or quantize_rows(rmsnorm(x)) with a
    `norm_weight`. Two axes of `weight_scales` mean one scale per 128 x 128 block; rows of x then
    have one scale per group of 128 columns.
    """
    return multiply_8bit("fp8", **locals())
