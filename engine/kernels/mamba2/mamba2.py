"""Mamba-2's selective state space: `cuda_src/mamba2/`."""

from __future__ import annotations

import math
from typing import Any

from engine import reference
from engine.dtypes import BFLOAT16, accumulation_dtype
from engine.kernels._attention import checked_longest
from engine.kernels._contract import FLOAT32, FLOAT64, MIRROR_FLOATS, Contract
from engine.kernels._module import ModuleSpec
from engine.kernels._state_slots import StateSlots
from engine.kernels.mamba2 import chunks, steps
from engine.kernels.mamba2.problem import STATE_BITS, kernel_args

__all__ = ["mamba2", "specs"]

MAX_STATE_SIZE = 256
_MAX_STEPS = 8  # tokens of a sequence up to which the recurrence is faster than a chunk


def specs(
    dtype: str, *, state_shape: tuple[int, int] | None = None, **_: Any
) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch, for states of one shape (P, N) or of any."""
    found = [steps.spec(dtype, state_dtype) for state_dtype in STATE_BITS]
    return tuple(found + chunks.specs(dtype, STATE_BITS, state_shape))


def mamba2(
    x: Any,
    dt: Any,
    b: Any,
    c: Any,
    *,
    a_log: Any,
    d: Any,
    dt_bias: Any,
    states: Any,
    state_slots: Any,
    cu_seqlens_q: Any,
    context_lens: Any,
    state_targets: Any = None,
    snapshot_slots: Any = None,
    snapshot_offsets: Any = None,
    dt_min: float = 0.0,
    dt_max: float = math.inf,
    max_seqlen_q: int | None = None,
    deterministic: bool = False,
    pdl: bool = False,
    out: Any = None,
) -> Any:
    """Update a state per head with each token's input, and read it.

    Parameters
    ----------
    x : (T, H, P) array of float32, float16 or bfloat16 (NumPy: or float64)
        Inputs of all sequences, concatenated, after convolution and activation. Views whose last
        axis is contiguous are not copied.
    dt : (T, H) array of x's dtype
        Time steps before their bias and softplus.
    b, c : (T, G, N) arrays of x's dtype
        Input and output directions. H is a multiple of G: head h uses group h // (H // G). N <=
        256.
    a_log, d, dt_bias : (H,) arrays of float32 (float64 for float64)
        Logarithm of the decay rate, factor of the skip connection, and bias of the time step.
    states : (num_slots, H, P, N) array of float32 or bfloat16 (float64 for float64)
        Written in place. A view with any stride between slots.
    state_slots, cu_seqlens_q, context_lens, state_targets, snapshot_slots, snapshot_offsets
        Where states are read and written; see `causal_conv`. A snapshot's position in the sequence
        must be a multiple of 64, or its end.
    dt_min, dt_max : float
        Bounds of the time step. Equal bounds fix it, as in lightning attention: 1, whatever dt is.
    max_seqlen_q : int, optional
        Upper bound of the sequences' numbers of tokens, by default T. It only saves launches.
    deterministic : bool
        Run the recurrence for sequences of any length: a token's result then does not depend on
        how its sequence is divided into calls, with float32 states.
    pdl : bool
        Programmatic dependent launch: the kernel reads nothing before its predecessor has ended.
    out : (T, H, P) array of x's dtype, optional
        Array for the result.

    Returns
    -------
    out : (T, H, P) array of x's dtype

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument breaks the contract. Lengths and slots are checked on NumPy arrays; on the
        GPU a slot outside the states is not written, and reads as zeros.

    Notes
    -----
    For each token and head, with step = clip(softplus(dt + dt_bias), dt_min, dt_max) [1]_:

        S = S e^(-step e^a_log) + (step x) b^T;  out = S c + d x

    All of it is float32; a state is rounded when it is written, and out once. Sequences of at most
    8 tokens, or of as many as `state_targets` has columns, run this recurrence. Longer ones run in
    chunks that end at multiples of 64 in the sequence, whose products have operands of 16 bits with
    float32 sums; float32, and rows that are not of multiples of 16 values, remain with the
    recurrence. A result depends on the sequence's own tokens only, so not on the rest of the batch.

    References
    ----------
    .. [1] Dao, Gu: Transformers are SSMs, arXiv:2405.21060.

    Examples
    --------
    >>> import numpy as np
    >>> one, gate = np.ones((1, 1, 1), np.float32), np.zeros(1, np.float32)
    >>> slots = {"states": np.zeros((1, 1, 1, 1), np.float32), "state_slots": np.zeros(1, np.int32)}
    >>> lens = {"cu_seqlens_q": np.array([0, 1], np.int32), "context_lens": np.ones(1, np.int32)}
    >>> heads = {"a_log": gate, "d": gate + 2, "dt_bias": gate}
    >>> mamba2(one, one[0] * 0, one, one, **heads, **slots, **lens).round(3)  # ln 2 + 2
    array([[[2.693]]], dtype=float32)
    """
    call = Contract("mamba2")
    x = call.array("x", x, "T H P", MIRROR_FLOATS, layout="rows")
    dt = call.array("dt", dt, "T H", x.dtype, layout="rows")
    b = call.array("b", b, "T G N", x.dtype, layout="rows")
    c = call.array("c", c, "T G N", x.dtype, layout="rows")
    real = accumulation_dtype(x.dtype)
    gates = {"a_log": a_log, "d": d, "dt_bias": dt_bias}
    gates = {name: call.array(name, array, "H", real) for name, array in gates.items()}
    groups = call["G"]
    ok = groups > 0 and call["H"] % groups == 0
    call.check("x", ok, f"of a multiple of {groups} heads, as b has groups", call["H"])
    call.check("b", 0 < call["N"] <= MAX_STATE_SIZE, f"of 1 to {MAX_STATE_SIZE}", call["N"])
    slots = StateSlots.checked(
        call,
        states,
        "H P N",
        FLOAT64 if real == FLOAT64 else (FLOAT32, BFLOAT16),
        call["T"],
        state_slots=state_slots,
        cu_seqlens_q=cu_seqlens_q,
        context_lens=context_lens,
        state_targets=state_targets,
        snapshot_slots=snapshot_slots,
        snapshot_offsets=snapshot_offsets,
    )
    limits: dict[str, Any] = {
        "dt_min": call.number("dt_min", dt_min),
        "dt_max": call.number("dt_max", dt_max),
    }
    arrays = {"x": x, "dt": dt, "b": b, "c": c, **gates}
    longest = call["T"]
    if max_seqlen_q is not None:
        starts = slots.arrays["cu_seqlens_q"]
        longest = min(longest, checked_longest(call, "max_seqlen_q", max_seqlen_q, starts))
    if call.on_cpu:
        call.check_target(out, x.shape, x.dtype)
        return call.finish(out, reference.mamba2(**arrays, **slots.arrays, **limits))
    out = call.output("out", out, x.shape, x.dtype)
    args = kernel_args(arrays, slots, limits, out)
    # Chunks write one state each; `state_targets` asks for the states after every token.
    step_limit = max(_MAX_STEPS, args["num_targets"])
    is_chunked = not deterministic and longest > step_limit and chunks.is_supported(args)
    max_steps = step_limit if is_chunked else longest
    if not (is_chunked and slots.state_slots.shape[0] == 1):
        steps.launch(args, max_steps=max_steps, pdl=pdl)
    if is_chunked:
        chunks.launch(args, max_steps=max_steps)
    return out
