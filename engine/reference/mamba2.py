"""NumPy mirror of `engine.kernels.mamba2`: its specification."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from engine.dtypes import accumulation_dtype
from engine.reference._state_slots import first_state, state_writes

__all__ = ["mamba2"]

Array = np.ndarray[Any, Any]


def mamba2(
    x: Array,
    dt: Array,
    b: Array,
    c: Array,
    *,
    a_log: Array,
    d: Array,
    dt_bias: Array,
    states: Array,
    state_slots: Array,
    cu_seqlens_q: Array,
    context_lens: Array,
    state_targets: Array | None = None,
    snapshot_slots: Array | None = None,
    snapshot_offsets: Array | None = None,
    dt_min: float = 0.0,
    dt_max: float = np.inf,
) -> Array:
    """S = S e^(-step e^a_log) + (step x) b^T; out = S c + d x, per token and head.

    S is (P, N), and step = clip(softplus(dt + dt_bias), dt_min, dt_max).
    """
    real = accumulation_dtype(x.dtype).type
    targets = state_slots if state_targets is None else state_targets
    heads_per_group = x.shape[1] // b.shape[1]
    b, c = (np.repeat(y.astype(real), heads_per_group, axis=1)[:, :, None] for y in (b, c))
    step = np.logaddexp(0, dt.astype(real) + dt_bias.astype(real))
    step = np.clip(step, real(dt_min), real(dt_max))[:, :, None, None]  # (T, H, 1, 1)
    decay = np.exp(-step * np.exp(a_log.astype(real))[:, None, None])
    inputs = step * x.astype(real)[..., None]  # (T, H, P, 1)
    out = np.empty(x.shape, x.dtype)
    for i, (begin, end) in enumerate(itertools.pairwise(cu_seqlens_q)):
        state = first_state(states, state_slots[i], context_lens[i] - (end - begin), real)
        writes = state_writes(i, end - begin, targets, snapshot_slots, snapshot_offsets)
        for t in range(begin, end):
            state = state * decay[t] + inputs[t] * b[t]
            out[t] = np.sum(state * c[t], axis=-1) + d.astype(real)[:, None] * x[t].astype(real)
            for slot in (slot for count, slot in writes if begin + count == t + 1):
                states[slot] = state
    return out
