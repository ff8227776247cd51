"""NumPy mirror of `engine.kernels.kv_store`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.reference._quantized_kv import quantize_kv

__all__ = ["kv_store"]

Array = np.ndarray[Any, Any]


def kv_store(
    k: Array,
    v: Array,
    k_pages: Array,
    v_pages: Array,
    slot_mapping: Array,
    *,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
) -> None:
    """pages[block, :, offset] = row t, with slot_mapping[t] = block * block_size + offset.

    With scales (K,) the pages are quantized: they hold codes of row / scale.
    """
    is_kept = slot_mapping >= 0
    block, offset = np.divmod(slot_mapping[is_kept], k_pages.shape[2])
    k = k[is_kept]
    v = v[is_kept]
    if k_scale is not None and v_scale is not None:
        k, v = (quantize_kv(x, s, k_pages.dtype) for x, s in ((k, k_scale), (v, v_scale)))
    k_pages[block, :, offset] = k
    v_pages[block, :, offset] = v
