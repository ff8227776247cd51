"""NumPy mirror of `engine.kernels.moe_route_backward`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.dtypes import accumulation_dtype
from engine.reference.moe_route import LEAST_TOTAL, router_scores

__all__ = ["moe_route_backward"]

Array = np.ndarray[Any, Any]


def moe_route_backward(
    dweights: Array,
    logits: Array,
    experts: Array,
    *,
    score: str = "softmax",
    renormalize: bool = True,
    scale: float = 1.0,
) -> Array:
    """Return the gradient of the routing weights for the logits; the choice is fixed."""
    real = accumulation_dtype(logits.dtype).type
    scores = router_scores(logits.astype(real, copy=False), score)
    chosen = np.take_along_axis(scores, experts, axis=1)
    d = dweights.astype(real, copy=False) * real(scale)
    if renormalize:
        total = chosen.sum(axis=1, keepdims=True)
        least = np.maximum(total, real(LEAST_TOTAL))
        # The divisor depends on the scores unless it is the constant that avoids a division by 0.
        through = np.where(total > LEAST_TOTAL, (d * chosen).sum(axis=1, keepdims=True) / least, 0)
        d = (d - through) / least
    by_score = np.zeros_like(scores)
    np.put_along_axis(by_score, experts, d, axis=1)
    if score == "sigmoid":
        return np.asarray(by_score * scores * (1 - scores))
    return np.asarray(scores * (by_score - (by_score * scores).sum(axis=1, keepdims=True)))
