"""NumPy mirror of `engine.kernels.gated_delta`: its specification."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from engine.dtypes import accumulation_dtype
from engine.reference._activation import sigmoid
from engine.reference._state_slots import first_state, state_writes
from engine.reference.gated_norm import gated_norm

__all__ = ["gated_delta"]

Array = np.ndarray[Any, Any]


def gated_delta(
    q: Array,
    k: Array,
    v: Array,
    a: Array,
    b: Array,
    *,
    a_log: Array,
    dt_bias: Array,
    states: Array,
    state_slots: Array,
    cu_seqlens_q: Array,
    context_lens: Array,
    state_targets: Array | None = None,
    snapshot_slots: Array | None = None,
    snapshot_offsets: Array | None = None,
    beta_scale: float = 1.0,
    scale: float | None = None,
    gate_bound: float = 0.0,
    eps: float = 1e-6,
    z: Array | None = None,
    norm_weight: Array | None = None,
    norm_eps: float = 1e-6,
    norm_activation: str = "silu",
) -> Array:
    """S = S e^g; u = beta (v - S k); S = S + u k^T; out = S q, per token and value head.

    S is (dv, dk), the transpose of the papers' state; g = -e^a_log softplus(a + dt_bias) or, with
    a bound, gate_bound sigmoid(e^a_log (a + dt_bias)); and beta = beta_scale sigmoid(b). With `z`,
    `gated_norm` follows.
    """
    real = accumulation_dtype(v.dtype).type
    targets = state_slots if state_targets is None else state_targets
    heads_per_key = v.shape[1] // k.shape[1]
    q, k = (np.repeat(_unit(x.astype(real), eps), heads_per_key, axis=1) for x in (q, k))
    q = q * real(q.shape[2] ** -0.5 if scale is None else scale)
    rate = np.exp(a_log.astype(real)).reshape(-1, *(1,) * (a.ndim - 2))
    decay = np.exp(_log_decay(a.astype(real) + dt_bias.astype(real), rate, real(gate_bound)))
    width = decay.shape[2] if decay.ndim == 3 else 1
    decay = decay.reshape(*decay.shape[:2], 1, width)  # width: dk with a gate per channel
    beta = real(beta_scale) * sigmoid(b.astype(real))
    out = np.empty(v.shape, v.dtype)
    for i, (begin, end) in enumerate(itertools.pairwise(cu_seqlens_q)):
        state = first_state(states, state_slots[i], context_lens[i] - (end - begin), real)
        writes = state_writes(i, end - begin, targets, snapshot_slots, snapshot_offsets)
        for t in range(begin, end):
            state = state * decay[t]
            u = beta[t][:, None] * (v[t].astype(real) - _products(state, k[t]))
            state += u[:, :, None] * k[t][:, None, :]
            out[t] = _products(state, q[t])
            for slot in (slot for count, slot in writes if begin + count == t + 1):
                states[slot] = state
    if z is not None and norm_weight is not None:
        out = gated_norm(out, z, norm_weight, eps=norm_eps, activation=norm_activation)
    return out


def _log_decay(x: Array, rate: Array, bound: Any) -> Array:
    """-rate softplus(x) or, with a bound, bound sigmoid(rate x)."""
    scaled: Array = rate * x
    return -rate * np.logaddexp(0, x) if bound == 0 else bound * np.exp(-np.logaddexp(0, -scaled))


def _unit(x: Array, eps: float) -> Array:
    """x / sqrt(sum(x^2) + eps)."""
    norm: Array = np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + x.dtype.type(eps))
    return x / norm


def _products(state: Array, vector: Array) -> Array:
    """Product of each head's state (Hv, dv, dk) and vector (Hv, dk)."""
    product: Array = np.matmul(state, vector[:, :, None])[..., 0]
    return product
