"""NumPy mirror of `engine.kernels.all_gather`: its specification."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["all_gather"]

Array = np.ndarray[Any, Any]


def all_gather(x: Array, peers: Sequence[Array]) -> Array:
    """The last axes of all ranks' arrays one after another, in the order of ranks."""
    return np.concatenate([np.asarray(part, x.dtype) for part in peers], axis=-1)
