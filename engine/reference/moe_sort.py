"""NumPy mirror of `engine.kernels.moe_sort`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.reference.moe_route import Routing, sorted_by_expert

__all__ = ["moe_sort"]

Array = np.ndarray[Any, Any]


def moe_sort(ids: Array, weights: Array, *, num_experts: int) -> Routing:
    """Sort the pairs (token, expert) of given experts by expert, then by token and rank."""
    experts = np.clip(ids, 0, num_experts - 1).astype(np.int32)
    return Routing(experts, weights, *sorted_by_expert(experts, num_experts))
