"""NumPy mirror of `engine.kernels.qk_norm_rope_store`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.reference.kv_store import kv_store
from engine.reference.rmsnorm import rmsnorm
from engine.reference.rope import rope

__all__ = ["qk_norm_rope_store"]

Array = np.ndarray[Any, Any]


def qk_norm_rope_store(
    q: Array,
    k: Array,
    v: Array,
    positions: Array,
    cos_sin: Array,
    k_pages: Array,
    v_pages: Array,
    slot_mapping: Array,
    *,
    q_weight: Array | None = None,
    k_weight: Array | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    interleaved: bool = False,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
) -> None:
    """Normalise the heads of q and k, apply rope, write q in place and k and v to their pages."""
    rotated = q
    keys = k
    if q_weight is not None:
        rotated = rmsnorm(rotated, q_weight, eps=eps, weight_offset=weight_offset)
    if k_weight is not None:
        keys = rmsnorm(keys, k_weight, eps=eps, weight_offset=weight_offset)
    rotated, keys = rope(rotated, keys, positions, cos_sin, interleaved=interleaved)
    q[...] = rotated
    kv_store(keys, v, k_pages, v_pages, slot_mapping, k_scale=k_scale, v_scale=v_scale)
