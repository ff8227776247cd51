"""NumPy mirror of `engine.kernels.qk_norm_rope_store`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.dtypes import accumulation_dtype
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
    v_weight: Array | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    norm_after_rope: bool = False,
    interleaved: bool = False,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    q_factors: Array | None = None,
) -> None:
    """Normalise the heads, apply rope to q and k, write q in place and k and v to their pages."""
    if norm_after_rope:
        turned = rope(_real(q), _real(k), positions, cos_sin, interleaved=interleaved)
        query = _normed(turned[0], q, q_weight, eps, weight_offset)
        keys = _normed(turned[1], k, k_weight, eps, weight_offset)
    else:
        query, keys = (
            x if weight is None else rmsnorm(x, weight, eps=eps, weight_offset=weight_offset)
            for x, weight in ((q, q_weight), (k, k_weight))
        )
        query, keys = rope(query, keys, positions, cos_sin, interleaved=interleaved)
    if q_factors is not None:
        query = query.astype(accumulation_dtype(q.dtype)) * q_factors[positions, None, None]
    q[...] = query
    values = v
    if v_weight is not None:
        values = rmsnorm(v, v_weight, eps=eps, weight_offset=weight_offset)
    kv_store(keys, values, k_pages, v_pages, slot_mapping, k_scale=k_scale, v_scale=v_scale)


def _real(x: Array) -> Array:
    return x.astype(np.float32, copy=False)


def _normed(turned: Array, x: Array, weight: Array | None, eps: float, offset: float) -> Array:
    """Return `turned` / rms(x) * (weight + offset), rounded once: a rotation keeps the rms."""
    if weight is not None:
        mean_square = np.mean(_real(x) ** 2, axis=-1, keepdims=True)
        scale = 1 / np.sqrt(mean_square + np.float32(eps))
        turned = turned * scale * (_real(weight) + np.float32(offset))
    return np.asarray(turned, x.dtype)
