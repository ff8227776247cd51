"""NumPy mirror of `engine.kernels.altup_correct`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.reference._altup import modalities
from engine.reference._row_by_row import multiply_row_by_row

__all__ = ["altup_correct"]

Array = np.ndarray[Any, Any]


def altup_correct(
    streams: Array,
    x: Array,
    router_norm: Array,
    router: Array,
    coefs: Array,
    *,
    scale: Array | None = None,
    eps: float = 1e-6,
) -> tuple[Array, Array]:
    """Return p_i + (x - p_0) (1 + c_i) for each stream p_i, and scale times the first one."""
    m = modalities(x, router_norm, router, eps)
    factors = 1 + multiply_row_by_row(m, coefs.astype(np.float32).T)  # (T, S)
    predicted = streams.astype(np.float32)
    innovation = x.astype(np.float32) - predicted[:, 0]
    corrected = predicted + factors[:, :, None] * innovation[:, None]
    own = corrected[:, 0]
    if scale is not None:
        own = own * scale.astype(np.float32)
    return corrected.astype(streams.dtype), own.astype(streams.dtype)
