"""NumPy mirror of `engine.kernels.moe_wgrad`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.dtypes import accumulation_dtype
from engine.reference.moe_route import Routing

__all__ = ["moe_wgrad"]

Array = np.ndarray[Any, Any]


def moe_wgrad(dy: Array, x: Array, routing: Routing, *, gather: str) -> Array:
    """Return dy_e^T x_e (E, R, K) over the rows of each expert e, in float32, rounded once.

    One operand has rows sorted by expert; `gather` names the other, whose rows are tokens. An
    expert without rows gets zeros.
    """
    (_, top_k) = routing.experts.shape
    real = accumulation_dtype(x.dtype)
    num_experts = len(routing.offsets) - 1
    dw = np.zeros((num_experts, dy.shape[1], x.shape[1]), x.dtype)
    for expert in range(num_experts):
        here = slice(int(routing.offsets[expert]), int(routing.offsets[expert + 1]))
        tokens = routing.order[here] // top_k
        of_dy = dy[tokens if gather == "dy" else here].astype(real, copy=False)
        of_x = x[tokens if gather == "x" else here].astype(real, copy=False)
        dw[expert] = of_dy.T @ of_x
    return dw
