"""NumPy mirror of `engine.kernels.kv_swap`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["kv_swap"]

Array = np.ndarray[Any, Any]


def kv_swap(source: Array, target: Array, block_pairs: Array) -> None:
    """target[:, dst] = source[:, src] for each pair (src, dst)."""
    src, dst = block_pairs.T
    target[:, dst] = source[:, src]
