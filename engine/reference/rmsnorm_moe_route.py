"""NumPy mirror of `engine.kernels.rmsnorm_moe_route`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.reference.moe_route import moe_route
from engine.reference.quantize_rows import quantize_rows
from engine.reference.rmsnorm import rmsnorm

__all__ = ["rmsnorm_moe_route"]

Array = np.ndarray[Any, Any]


def rmsnorm_moe_route(
    x: Array,
    norm_weight: Array,
    weight: Array,
    top_k: int,
    *,
    bias: Array | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    residual: Array | None = None,
    quantize_out: bool = False,
    score: str = "softmax",
    correction: Array | None = None,
    expert_scale: Array | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    renormalize: bool = True,
    scale: float = 1.0,
    num_shared: int = 0,
    slots: Array | None = None,
    load: Array | None = None,
) -> tuple[Any, ...]:
    """Normalise x, multiply it by the router's weight, and route; y is rounded, logits are not."""
    normed = rmsnorm(x, norm_weight, eps=eps, weight_offset=weight_offset, residual=residual)
    y, *h = normed if isinstance(normed, tuple) else (normed,)
    logits = y.astype(np.float32) @ weight.astype(np.float32).T
    if bias is not None:
        logits += bias.astype(np.float32)
    routing = moe_route(
        logits,
        top_k,
        score=score,
        correction=correction,
        expert_scale=expert_scale,
        num_groups=num_groups,
        top_groups=top_groups,
        renormalize=renormalize,
        scale=scale,
        num_shared=num_shared,
        slots=slots,
        load=load,
    )
    codes = quantize_rows(y, group=128) if quantize_out else ()
    return (y, routing, *codes, *h)
