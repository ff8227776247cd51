"""NumPy mirror of `engine.kernels.moe_combine`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.dtypes import accumulation_dtype

__all__ = ["moe_combine"]

Array = np.ndarray[Any, Any]


def moe_combine(
    pairs: Array,
    *,
    shared: Array | None = None,
    shared_gate: Array | None = None,
    residual: Array | None = None,
) -> Array:
    """Sum the outputs of each token's experts in rank order, then shared, then residual.

    The sum is float32, rounded once; `shared` is multiplied by sigmoid(shared_gate).
    """
    real = accumulation_dtype(pairs.dtype)
    y = np.zeros((pairs.shape[0], pairs.shape[2]), real)
    for rank in range(pairs.shape[1]):
        y += pairs[:, rank].astype(real)
    if shared is not None:
        z = shared.astype(real)
        if shared_gate is not None:
            with np.errstate(over="ignore"):
                z = z / (1 + np.exp(-shared_gate.astype(real).reshape(-1, 1)))
        y += z
    if residual is not None:
        y += residual.astype(real)
    return y.astype(pairs.dtype)
