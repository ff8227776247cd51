"""NumPy mirror of `engine.kernels.gated_norm`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.dtypes import accumulation_dtype
from engine.reference._activation import silu

__all__ = ["gated_norm"]

Array = np.ndarray[Any, Any]


def gated_norm(
    x: Array,
    z: Array,
    weight: Array,
    *,
    eps: float = 1e-6,
    activation: str = "silu",
    gate_first: bool = False,
) -> Array:
    """y = h / sqrt(mean(h^2) + eps) * weight * gate, with h = x and gate = activation(z).

    With `gate_first`: h = x * gate, and y = h / sqrt(mean(h^2) + eps) * weight.
    """
    real = accumulation_dtype(x.dtype).type
    z = z.astype(real)
    with np.errstate(over="ignore"):
        gate = silu(z) if activation == "silu" else 1 / (1 + np.exp(-z))
    h = x.astype(real)
    if gate_first:
        h *= gate
    mean_square = np.mean(h * h, axis=-1, keepdims=True)
    y = h * (1 / np.sqrt(mean_square + real(eps))) * weight.astype(real)
    if not gate_first:
        y *= gate
    return np.asarray(y, x.dtype)
