"""NumPy mirror of `engine.kernels.mla_store`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.reference.rmsnorm import rmsnorm
from engine.reference.rope import rope

__all__ = ["mla_store"]

Array = np.ndarray[Any, Any]


def mla_store(
    q_rope: Array,
    kv: Array,
    weight: Array,
    positions: Array,
    cos_sin: Array,
    pages: Array,
    slot_mapping: Array,
    *,
    eps: float = 1e-6,
) -> None:
    """Normalise the latents, rotate keys and queries in place, and write kv to the pages."""
    latent = len(weight)
    kv[:, :latent] = rmsnorm(kv[:, :latent], weight, eps=eps)
    q_rope[...], k_rope = rope(q_rope, kv[:, None, latent:], positions, cos_sin)
    kv[:, latent:] = k_rope[:, 0]
    block_size = pages.shape[1]
    is_stored = slot_mapping >= 0
    slots = slot_mapping[is_stored]
    pages[slots // block_size, slots % block_size] = kv[is_stored]
