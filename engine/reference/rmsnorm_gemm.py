"""NumPy mirror of `engine.kernels.rmsnorm_gemm`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.reference.gemm import gemm
from engine.reference.rmsnorm import rmsnorm

__all__ = ["rmsnorm_gemm"]

Array = np.ndarray[Any, Any]


def rmsnorm_gemm(
    x: Array,
    norm_weight: Array,
    weight: Array,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    bias: Array | None = None,
    activation: str | None = None,
    deterministic: bool = False,
) -> Array:
    """y = activation(rmsnorm(x) W^T + bias); the normalised row is rounded to x's dtype first."""
    normalised = rmsnorm(x, norm_weight, eps=eps, weight_offset=weight_offset)
    options: dict[str, Any] = {"activation": activation, "deterministic": deterministic}
    return gemm(normalised, weight, bias=bias, **options)
