"""NumPy mirror of `engine.kernels.merge_states`: its specification."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["merge_states"]

Array = np.ndarray[Any, Any]


def merge_states(
    outputs: Array | Sequence[Array], lses: Array | Sequence[Array]
) -> tuple[Array, Array]:
    """out = sum_s w_s outputs_s / sum_s w_s with w_s = exp(lse_s - max lse); and the merged lse."""
    top = np.max(np.stack(list(lses)), axis=0)
    base = np.where(np.isneginf(top), np.float32(0), top)
    total = np.zeros_like(top)
    product = np.zeros(outputs[0].shape, np.float32)
    for output, lse in zip(outputs, lses, strict=True):
        weight = np.exp(lse - base)
        total += weight
        used = np.where(np.isneginf(lse)[..., None], 0, output).astype(np.float32)
        product += weight[..., None] * used
    out = product / np.where(total == 0, 1, total)[..., None]
    with np.errstate(divide="ignore"):
        return out.astype(outputs[0].dtype), base + np.log(total)
