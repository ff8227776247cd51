"""NumPy mirror of `engine.kernels.gemm_wna16`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.reference.gemm import gemm
from engine.weights import Weight, unpack_weight

__all__ = ["gemm_wna16"]

Array = np.ndarray[Any, Any]


def gemm_wna16(
    x: Array,
    weight: Weight,
    *,
    bias: Array | None = None,
    residual: Array | None = None,
    activation: str | None = None,
    out_dtype: Any = None,
    deterministic: bool = False,
) -> Array:
    """y = activation(x W^T + bias) + residual, in float32, with W dequantized to float32."""
    return gemm(
        x,
        unpack_weight(weight),
        bias=bias,
        residual=residual,
        activation=activation,
        out_dtype=out_dtype,
        deterministic=deterministic,
    )
