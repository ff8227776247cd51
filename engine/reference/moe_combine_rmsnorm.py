"""NumPy mirror of `engine.kernels.moe_combine_rmsnorm`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.reference.moe_combine import moe_combine
from engine.reference.quantize_rows import quantize_rows
from engine.reference.rmsnorm import rmsnorm

__all__ = ["moe_combine_rmsnorm"]

Array = np.ndarray[Any, Any]


def moe_combine_rmsnorm(
    pairs: Array,
    residual: Array,
    weight: Array,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    dtype: str | None = None,
    group: int = 0,
) -> tuple[Array, ...]:
    """Sum the outputs of each token's experts, add the residual, normalise, and quantize y."""
    x = moe_combine(pairs)
    y, h = rmsnorm(x, weight, eps=eps, weight_offset=weight_offset, residual=residual)
    return (y, h) if dtype is None else (*quantize_rows(y, dtype=dtype, group=group), h)
