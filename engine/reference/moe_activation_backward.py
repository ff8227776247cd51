"""NumPy mirror of `engine.kernels.moe_activation_backward`: its specification."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.dtypes import accumulation_dtype
from engine.reference.moe_route import Routing

__all__ = ["moe_activation_backward"]

Array = np.ndarray[Any, Any]


def moe_activation_backward(
    dy: Array,
    h: Array,
    routing: Routing,
    *,
    activation: str = "swiglu",
    alpha: float = 1.702,
    limit: float = 7.0,
) -> tuple[Array, Array, Array]:
    """Return dh (P, 2F), w · act(h) (P, F) and dweights (T, k) for rows h = [gate | up].

    `dy` is the gradient with respect to w · act(h), and w the routing weight of a row's pair.
    Everything is float32; dh and w · act(h) are rounded once.
    """
    real = accumulation_dtype(dy.dtype).type
    gate, up = np.split(h.astype(real, copy=False), 2, axis=1)
    dy_ = dy.astype(real, copy=False)
    is_clamped = activation == "swiglu_clamped"
    bound = real(limit if is_clamped else np.inf)
    slope = real(alpha if is_clamped else 1)
    shift = real(1 if is_clamped else 0)
    gate_moves = ~(gate > bound)  # so does NaN
    up_moves = ~(np.abs(up) > bound)
    gate = np.minimum(gate, bound)
    up = np.clip(up, -bound, bound)
    with np.errstate(over="ignore"):
        sigmoid = 1 / (1 + np.exp(-slope * gate))
    y = gate * sigmoid * (up + shift)
    weights = routing.weights.reshape(-1)[routing.order].astype(real, copy=False)[:, None]
    by_gate = np.where(gate_moves, (up + shift) * sigmoid * (1 + slope * gate * (1 - sigmoid)), 0)
    by_up = np.where(up_moves, gate * sigmoid, 0)
    dh = np.concatenate([dy_ * weights * by_gate, dy_ * weights * by_up], axis=1)
    dweights = np.empty(len(routing.order), real)
    dweights[routing.order] = np.sum(dy_ * y, axis=1)
    scaled = (weights * y).astype(dy.dtype)
    return dh.astype(dy.dtype), scaled, dweights.reshape(routing.weights.shape)
