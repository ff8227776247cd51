"""NumPy mirror of `engine.kernels.causal_conv`: its specification."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from engine.dtypes import accumulation_dtype
from engine.reference._activation import silu
from engine.reference._state_slots import first_state, state_writes

__all__ = ["causal_conv"]

Array = np.ndarray[Any, Any]


def causal_conv(
    x: Array,
    weight: Array,
    *,
    states: Array,
    state_slots: Array,
    cu_seqlens_q: Array,
    context_lens: Array,
    state_targets: Array | None = None,
    snapshot_slots: Array | None = None,
    snapshot_offsets: Array | None = None,
    bias: Array | None = None,
    activation: str | None = None,
    in_gate: Array | None = None,
    out_gate: Array | None = None,
) -> Array:
    """y[t, c] = activation(bias[c] + sum over j < K of weight[c, j] * x[t - K + 1 + j, c]).

    The K - 1 inputs before a sequence's first token are in its state, oldest first. With gates,
    the inputs are in_gate * x, rounded, and the result is out_gate * y.
    """
    real = accumulation_dtype(x.dtype)
    if in_gate is not None:
        x = (x.astype(real) * in_gate.astype(real)).astype(x.dtype)
    width = weight.shape[1]
    targets = state_slots if state_targets is None else state_targets
    out = np.empty(x.shape, x.dtype)
    for b, (begin, end) in enumerate(itertools.pairwise(cu_seqlens_q)):
        num_cached = context_lens[b] - (end - begin)
        before = first_state(states, state_slots[b], num_cached, x.dtype)
        inputs = np.concatenate([before, x[begin:end]])
        y = np.zeros((end - begin, x.shape[1]), real)
        for j in range(width):
            y += weight[:, j].astype(real) * inputs[j : j + end - begin].astype(real)
        if bias is not None:
            y += bias.astype(real)
        y = silu(y) if activation == "silu" else y
        out[begin:end] = y if out_gate is None else y * out_gate[begin:end].astype(real)
        for count, slot in state_writes(b, end - begin, targets, snapshot_slots, snapshot_offsets):
            states[slot] = inputs[count : count + width - 1]
    return out
