"""NumPy mirror of `engine.kernels.moe_combine`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.dtypes import accumulation_dtype
from engine.reference.moe_route import Routing

__all__ = ["moe_combine"]

Array = np.ndarray[Any, Any]


def moe_combine(
    pairs: Array,
    *,
    routing: Routing | None = None,
    num_identity: int = 0,
    identity: Array | None = None,
    shared: Array | None = None,
    shared_gate: Array | None = None,
    residual: Array | None = None,
) -> Array:
    """Sum the outputs of each token's experts in rank order, then shared, then residual.

    The sum is float32, rounded once; `shared` is multiplied by sigmoid(shared_gate). The last
    `num_identity` experts contribute their weight times `identity`, or nothing without it.
    """
    real = accumulation_dtype(pairs.dtype)
    y = np.zeros((pairs.shape[0], pairs.shape[2]), real)
    for rank in range(pairs.shape[1]):
        row = pairs[:, rank].astype(real)
        if routing is not None and num_identity:
            is_identity = routing.experts[:, rank, None] >= len(routing.offsets) - 1 - num_identity
            own = 0 if identity is None else identity.astype(real) * routing.weights[:, rank, None]
            row = np.where(is_identity, own, row)
        y += row
    if shared is not None:
        z = shared.astype(real)
        if shared_gate is not None:
            with np.errstate(over="ignore"):
                z = z / (1 + np.exp(-shared_gate.astype(real).reshape(-1, 1)))
        y += z
    if residual is not None:
        y += residual.astype(real)
    return y.astype(pairs.dtype)
