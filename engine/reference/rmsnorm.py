"""NumPy mirror of `engine.kernels.rmsnorm`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

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
    h = x
    if residual is not None:
        scaled = x.astype(np.float32) * np.float32(x_scale)
        h = (scaled + residual.astype(np.float32)).astype(x.dtype)
    h32 = h.astype(np.float32)
    if subtract_mean:
        h32 -= np.mean(h32, axis=-1, keepdims=True, dtype=np.float32)
    mean_square = np.mean(h32 * h32, axis=-1, keepdims=True, dtype=np.float32)
    scale = 1 / np.sqrt(mean_square + np.float32(eps))
    y = h32 * scale * (weight.astype(np.float32) + np.float32(weight_offset))
    if bias is not None:
        y += bias.astype(np.float32)
    y = y.astype(x.dtype)
    return y if residual is None else (y, h)
