"""NumPy mirror of `engine.kernels.all_gather`: its specification."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["all_gather"]

Array = np.ndarray[Any, Any]


def all_gather(x: Array, peers: Sequence[Array]) -> Array:
    """Concatenate all ranks' arrays along the last axis, in rank order."""
    return np.concatenate([np.asarray(part, x.dtype) for part in peers], axis=-1)
