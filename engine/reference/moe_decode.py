"""NumPy mirror of `engine.kernels.moe_decode`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.reference.gemm import gemm
from engine.reference.moe_combine import moe_combine
from engine.reference.moe_gemm import moe_gemm
from engine.reference.moe_route import moe_route
from engine.reference.rmsnorm import rmsnorm

__all__ = ["moe_decode"]

Array = np.ndarray[Any, Any]


def moe_decode(
    x: Array,
    norm_weight: Array,
    router: Array,
    gate_up: Array,
    down: Array,
    top_k: int,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    router_bias: Array | None = None,
    gate_up_bias: Array | None = None,
    down_bias: Array | None = None,
    activation: str = "swiglu",
    alpha: float = 1.702,
    limit: float = 7.0,
    score: str = "softmax",
    correction: Array | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    renormalize: bool = True,
    scale: float = 1.0,
    slots: Array | None = None,
    load: Array | None = None,
) -> Array:
    """x + experts(rmsnorm(x)); the normed row and the gated products are rounded, else the sum."""
    y = rmsnorm(x, norm_weight, eps=eps, weight_offset=weight_offset)
    routing = moe_route(
        gemm(y, router, bias=router_bias, out_dtype=np.float32),
        top_k,
        score=score,
        correction=correction,
        num_groups=num_groups,
        top_groups=top_groups,
        renormalize=renormalize,
        scale=scale,
        slots=slots,
        load=load,
    )
    gate: dict[str, Any] = {"activation": activation, "alpha": alpha, "limit": limit}
    rows = moe_gemm(y, gate_up, routing, bias=gate_up_bias, **gate).astype(np.float32)
    pairs = moe_gemm(rows, down, routing, bias=down_bias, scatter=True)
    pairs = pairs.reshape(*routing.experts.shape, x.shape[1])
    return moe_combine(pairs, residual=x.astype(np.float32)).astype(x.dtype)
