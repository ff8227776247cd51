"""NumPy mirror of `engine.kernels.decode_outputs`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["decode_outputs"]

Array = np.ndarray[Any, Any]


def decode_outputs(token_ids: Array, status: Array, rows: Array, last_ids: Array) -> Array:
    """last_ids[rows[b]] = token_ids[b, -1] unless rows[b] is padding; return [ids, status]."""
    is_row = (rows >= 0) & (rows < len(last_ids))
    last_ids[rows[is_row]] = token_ids[is_row, -1]
    return np.stack([token_ids, status])
