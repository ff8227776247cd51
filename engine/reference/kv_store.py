"""NumPy mirror of `engine.kernels.kv_store`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["kv_store"]

Array = np.ndarray[Any, Any]


def kv_store(k: Array, v: Array, k_pages: Array, v_pages: Array, slot_mapping: Array) -> None:
    """pages[block, :, offset] = row t, with slot_mapping[t] = block * block_size + offset."""
    is_kept = slot_mapping >= 0
    block, offset = np.divmod(slot_mapping[is_kept], k_pages.shape[2])
    k_pages[block, :, offset] = k[is_kept]
    v_pages[block, :, offset] = v[is_kept]
