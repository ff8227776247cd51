"""NumPy mirror of `engine.kernels.all_reduce_rmsnorm`: its specification."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.reference.all_reduce import all_reduce
from engine.reference.rmsnorm import rmsnorm

__all__ = ["all_reduce_rmsnorm"]

Array = np.ndarray[Any, Any]


def all_reduce_rmsnorm(
    x: Array,
    peers: Sequence[Array],
    residual: Array,
    weight: Array,
    *,
    eps: float = 1e-6,
    x_scale: float = 1.0,
    weight_offset: float = 0.0,
) -> Any:
    """Return rmsnorm(all_reduce(x), weight, residual=residual): (y, h)."""
    total = all_reduce(x, peers)
    return rmsnorm(
        total, weight, eps=eps, residual=residual, x_scale=x_scale, weight_offset=weight_offset
    )
