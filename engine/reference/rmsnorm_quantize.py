"""NumPy mirror of `engine.kernels.rmsnorm_quantize`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.reference.quantize_rows import quantize_rows
from engine.reference.rmsnorm import rmsnorm

__all__ = ["rmsnorm_quantize"]

Array = np.ndarray[Any, Any]


def rmsnorm_quantize(
    x: Array,
    weight: Array,
    *,
    eps: float = 1e-6,
    residual: Array | None = None,
    x_scale: float = 1.0,
    weight_offset: float = 0.0,
    dtype: str = "fp8",
    group: int = 0,
) -> Any:
    """quantize_rows(rmsnorm(x)); the normalised row is rounded to x's dtype in between."""
    y = rmsnorm(x, weight, eps=eps, residual=residual, x_scale=x_scale, weight_offset=weight_offset)
    if residual is None:
        return quantize_rows(y, dtype=dtype, group=group)
    return (*quantize_rows(y[0], dtype=dtype, group=group), y[1])
