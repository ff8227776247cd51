"""NumPy mirror of `engine.kernels.moe_gemm_combine`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.reference.moe_combine import moe_combine
from engine.reference.moe_gemm import moe_gemm
from engine.reference.moe_route import Routing
from engine.weights import Weight

__all__ = ["moe_gemm_combine"]

Array = np.ndarray[Any, Any]


def moe_gemm_combine(
    x: Array,
    weight: Array | Weight,
    routing: Routing,
    *,
    x_scales: Array | None = None,
    bias: Array | None = None,
    shared: Array | None = None,
    shared_gate: Array | None = None,
    residual: Array | None = None,
    deterministic: bool = False,
    quantize_x: bool = False,
    out_dtype: Any = None,
) -> Array:
    """Multiply each expert's rows (P, K) by its matrix, and sum the outputs of a token's experts.

    The experts' outputs are rounded before the sum.
    """
    pairs = moe_gemm(
        x,
        weight,
        routing,
        x_scales=x_scales,
        bias=bias,
        scatter=True,
        deterministic=deterministic,
        quantize_x=quantize_x,
        out_dtype=out_dtype,
    )
    return moe_combine(
        pairs.reshape(*routing.experts.shape, pairs.shape[1]),
        shared=shared,
        shared_gate=shared_gate,
        residual=residual,
    )
