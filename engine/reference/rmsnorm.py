"""NumPy mirror of `engine.kernels.rmsnorm`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.dtypes import accumulation_dtype

__all__ = ["rmsnorm"]

Array = np.ndarray[Any, Any]


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
    """y = h / sqrt(mean(h^2) + eps) * (weight + weight_offset), with h = x_scale * x + residual.

    With `subtract_mean` (LayerNorm): y = (h - mean(h)) / sqrt(variance(h) + eps) * ... + bias.
    """
    real = accumulation_dtype(x.dtype).type
    h = x
    if residual is not None:
        h = (x.astype(real) * real(x_scale) + residual.astype(real)).astype(x.dtype)
    centred = h.astype(real)
    if subtract_mean:
        centred -= np.mean(centred, axis=-1, keepdims=True)
    mean_square = np.mean(centred * centred, axis=-1, keepdims=True)
    scale = 1 / np.sqrt(mean_square + real(eps))
    y = centred * scale * (weight.astype(real) + real(weight_offset))
    if bias is not None:
        y += bias.astype(real)
    y = y.astype(x.dtype)
    return y if residual is None else (y, h)
