"""NumPy mirror of `engine.kernels.rmsnorm_backward`: its specification."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from engine.dtypes import accumulation_dtype

__all__ = ["rmsnorm_backward"]

Array = np.ndarray[Any, Any]


def rmsnorm_backward(
    dy: Array,
    h: Array,
    weight: Array,
    *,
    dh: Array | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    subtract_mean: bool = False,
) -> tuple[Array, ...]:
    """dx = (g - normed * mean(g * normed)) * scale + dh, dweight = sum of dy * normed over rows.

    normed = h * scale, scale = 1 / sqrt(mean(h^2) + eps), g = dy * (weight + weight_offset). With
    `subtract_mean`, h and g are reduced by their means first, and dbias, the sum of dy, follows.
    """
    real = accumulation_dtype(h.dtype).type
    n = h.shape[-1]
    centred = h.astype(real)
    upstream = dy.astype(real)
    g = upstream * (weight.astype(real) + real(weight_offset))
    if subtract_mean:
        centred -= np.mean(centred, axis=-1, keepdims=True)
        g -= np.mean(g, axis=-1, keepdims=True)
    scale = 1 / np.sqrt(np.mean(centred * centred, axis=-1, keepdims=True) + real(eps))
    normed = centred * scale
    dx = (g - normed * np.mean(g * normed, axis=-1, keepdims=True)) * scale
    if dh is not None:
        dx += dh.astype(real)
    rows = math.prod(h.shape[:-1]), n
    dweight = np.sum((upstream * normed).reshape(rows), axis=0)
    grads = [dx.astype(h.dtype), dweight.astype(weight.dtype)]
    if subtract_mean:
        grads.append(np.sum(upstream.reshape(rows), axis=0).astype(weight.dtype))
    return tuple(grads)
