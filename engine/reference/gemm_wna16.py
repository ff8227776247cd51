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
    low_rank: Any = None,
) -> Array:
    """y = activation(x W^T + bias + adapters) + residual, with W dequantized, in float32."""
    return gemm(
        x,
        unpack_weight(weight),
        bias=bias,
        residual=residual,
        activation=activation,
        out_dtype=out_dtype,
        deterministic=deterministic,
        low_rank=low_rank,
    )
