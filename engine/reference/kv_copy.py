"""NumPy mirror of `engine.kernels.kv_copy`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["kv_copy"]

Array = np.ndarray[Any, Any]


def kv_copy(pages: Array, block_pairs: Array) -> None:
    """pages[..., dst, :, :, :] = pages[..., src, :, :, :], with all sources read first."""
    source, destination = block_pairs.T
    pages[..., destination, :, :, :] = pages[..., source, :, :, :]
