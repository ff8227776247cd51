"""NumPy mirror of `engine.kernels.mla_expand`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["mla_expand"]

Array = np.ndarray[Any, Any]


def mla_expand(up: Array, k_rope: Array, *, nope_dim: int) -> Array:
    """k = [up[..., :nope] | k_rope]: every head's own key, and the one that all share."""
    num_tokens, num_heads, _ = up.shape
    shared = np.broadcast_to(k_rope[:, None], (num_tokens, num_heads, k_rope.shape[1]))
    return np.concatenate([up[..., :nope_dim], shared], axis=-1)
