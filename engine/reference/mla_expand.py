"""NumPy mirror of `engine.kernels.mla_expand`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["mla_expand"]

Array = np.ndarray[Any, Any]


def mla_expand(up: Array, k_rope: Array, *, nope_dim: int) -> tuple[Array, Array]:
    """k = [up[..., :nope] | k_rope], v = [up[..., nope:] | 0]: heads of equal width."""
    num_tokens, num_heads, _ = up.shape
    width = nope_dim + k_rope.shape[1]
    k, v = np.zeros((2, num_tokens, num_heads, width), up.dtype)
    k[..., :nope_dim] = up[..., :nope_dim]
    k[..., nope_dim:] = k_rope[:, None]
    v[..., : up.shape[2] - nope_dim] = up[..., nope_dim:]
    return k, v
