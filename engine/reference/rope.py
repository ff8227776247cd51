"""NumPy mirror of `engine.kernels.rope`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.dtypes import accumulation_dtype

__all__ = ["rope"]

Array = np.ndarray[Any, Any]


def rope(
    q: Array,
    k: Array,
    positions: Array,
    cos_sin: Array,
    *,
    interleaved: bool = False,
    inverse: bool = False,
) -> tuple[Array, Array]:
    """(a, b) -> (a cos - b sin, b cos + a sin) for each pair of features of each head.

    `inverse` turns by the negative angle.
    """
    real = accumulation_dtype(q.dtype)
    rotary_dim = cos_sin.shape[1]
    half = rotary_dim // 2
    rows = cos_sin[positions][:, None, :]  # (T, 1, R)
    cos = rows[..., :half]
    sin = -rows[..., half:] if inverse else rows[..., half:]
    if interleaved:
        first = slice(0, rotary_dim, 2)
        second = slice(1, rotary_dim, 2)
    else:
        first = slice(0, half)
        second = slice(half, rotary_dim)

    def rotate(x: Array) -> Array:
        a, b = (x[..., part].astype(real, copy=False) for part in (first, second))
        y = np.empty(x.shape, x.dtype)
        y[..., first] = a * cos - b * sin
        y[..., second] = b * cos + a * sin
        y[..., rotary_dim:] = x[..., rotary_dim:]
        return y

    return rotate(q), rotate(k)
