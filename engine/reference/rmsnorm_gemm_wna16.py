"""NumPy mirror of `engine.kernels.rmsnorm_gemm_wna16`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.reference.gemm_wna16 import gemm_wna16
from engine.reference.rmsnorm import rmsnorm
from engine.weights import Weight

__all__ = ["rmsnorm_gemm_wna16"]

Array = np.ndarray[Any, Any]


def rmsnorm_gemm_wna16(
    x: Array,
    norm_weight: Array,
    weight: Weight,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    bias: Array | None = None,
    activation: str | None = None,
) -> Array:
    """y = activation(rmsnorm(x) W^T + bias); the normalised row is rounded to x's dtype first."""
    normalised = rmsnorm(x, norm_weight, eps=eps, weight_offset=weight_offset)
    return gemm_wna16(normalised, weight, bias=bias, activation=activation)
