"""NumPy mirror of `engine.kernels.embedding`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.dtypes import accumulation_dtype

__all__ = ["PADDING_ID", "embedding"]

Array = np.ndarray[Any, Any]

PADDING_ID = -(2**31)
"""Token id of padding rows; kPaddingId of `cuda_src/common/padding.cuh`."""


def embedding(token_ids: Array, weight: Array, *, scale: float = 1.0) -> Array:
    """out[t] = weight[token_ids[t]] * scale; NaN for ids outside the table, 0 for `PADDING_ID`."""
    is_known = (token_ids >= 0) & (token_ids < weight.shape[0])
    real = accumulation_dtype(weight.dtype).type
    rows = weight[np.where(is_known, token_ids, 0)].astype(real, copy=False)
    rows *= real(scale)
    rows[~is_known] = np.nan
    rows[token_ids == PADDING_ID] = 0
    return rows.astype(weight.dtype, copy=False)
