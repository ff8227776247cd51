"""RMSNorm of float32 rows in few NumPy calls."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine import reference

__all__ = ["normalised", "rmsnorm"]

Array = np.ndarray[Any, Any]

_FLOAT32 = np.dtype(np.float32)


def rmsnorm(
    x: Array,
    weight: Array,
    *,
    eps: float = 1e-6,
    residual: Array | None = None,
    x_scale: float = 1.0,
    weight_offset: float = 0.0,
    subtract_mean: bool = False,
    bias: Array | None = None,
) -> Any:
    """See `engine.kernels.rmsnorm`."""
    if x.dtype != _FLOAT32 or subtract_mean or not x.shape[-1]:
        return reference.rmsnorm(
            x,
            weight,
            eps=eps,
            residual=residual,
            x_scale=x_scale,
            weight_offset=weight_offset,
            subtract_mean=subtract_mean,
            bias=bias,
        )
    if residual is None:
        return normalised(x, weight, eps, weight_offset)
    h = x + residual if x_scale == 1.0 else x * np.float32(x_scale) + residual
    return normalised(h, weight, eps, weight_offset), h


def normalised(x: Array, weight: Array, eps: float, weight_offset: float) -> Array:
    """Return x / rms(x) * (weight + weight_offset) for float32 rows (..., N), N >= 1."""
    mean_square = np.vecdot(x, x)[..., None] / np.float32(x.shape[-1])
    y: Array = x * (np.float32(1) / np.sqrt(mean_square + np.float32(eps)))
    y *= weight if weight_offset == 0.0 else weight + np.float32(weight_offset)
    return y
