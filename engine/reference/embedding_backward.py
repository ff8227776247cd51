"""NumPy mirror of `engine.kernels.embedding_backward`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.dtypes import accumulation_dtype

__all__ = ["embedding_backward"]

Array = np.ndarray[Any, Any]


def embedding_backward(
    dout: Array,
    sorted_ids: Array,
    order: Array,
    vocab_size: int,
    *,
    scale: float = 1.0,
    padding_id: int = -1,
) -> Array:
    """out[v] = scale * the sum of the rows of `dout` whose id is v; zero for `padding_id`."""
    real = accumulation_dtype(dout.dtype)
    sums = np.zeros((vocab_size, dout.shape[1]), real)
    is_summed = (sorted_ids >= 0) & (sorted_ids < vocab_size) & (sorted_ids != padding_id)
    np.add.at(sums, sorted_ids[is_summed], dout[order[is_summed]].astype(real))
    result: Array = (sums * real.type(scale)).astype(dout.dtype)
    return result
