"""Linear attention with the gated delta rule: `cuda_src/gated_delta/`."""

from __future__ import annotations

from typing import Any

from engine import reference
from engine.dtypes import BFLOAT16, accumulation_dtype
from engine.kernels._attention import checked_longest
from engine.kernels._contract import FLOAT32, FLOAT64, MIRROR_FLOATS, Contract
from engine.kernels._module import ModuleSpec
from engine.kernels._state_slots import StateSlots
from engine.kernels.gated_delta import chunks, steps
from engine.kernels.gated_delta.problem import STATE_BITS, OutputNorm, kernel_args

__all__ = ["gated_delta", "specs"]

MAX_HEAD_DIM = 256
_MAX_STEPS = 8  # tokens of a sequence up to which the recurrence is faster than a chunk


def specs(
    dtype: str,
    *,
    key_dim: int | None = None,
    value_dim: int | None = None,
    state_dtype: str | None = None,
    has_channel_gate: bool | None = None,
    **_: Any,
) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch, for one kind of head and state or for all.

    `key_dim` and `value_dim` are dk and dv; `has_channel_gate` tells whether each key channel has
    its own gate. None means any.
    """
    states = tuple(STATE_BITS) if state_dtype is None else (state_dtype,)
    gates = (False, True) if has_channel_gate is None else (has_channel_gate,)
    lanes = (8, 16, 32) if key_dim is None else (steps.choose_lanes(key_dim),)
    found = [
        steps.spec(dtype, state, n, has_channel_gate=gate)
        for state in states
        for n in lanes
        for gate in gates
    ]
    dims = None if key_dim is None or value_dim is None else (key_dim, value_dim)
    return tuple(found + chunks.specs(dtype, states, dims, gates))


def gated_delta(
    q: Any,
    k: Any,
    v: Any,
    a: Any,
    b: Any,
    *,
    a_log: Any,
    dt_bias: Any,
    states: Any,
    state_slots: Any,
    cu_seqlens_q: Any,
    context_lens: Any,
    state_targets: Any = None,
    snapshot_slots: Any = None,
    snapshot_offsets: Any = None,
    beta_scale: float = 1.0,
    scale: float | None = None,
    gate_bound: float = 0.0,
    eps: float = 1e-6,
    z: Any = None,
    norm_weight: Any = None,
    norm_eps: float = 1e-6,
    norm_activation: str = "silu",
    max_seqlen_q: int | None = None,
    deterministic: bool = False,
    pdl: bool = False,
    out: Any = None,
) -> Any:
    """Update a state per value head with the gated delta rule and read it with each query.

    Parameters
    ----------
    q, k : (T, Hk, dk) arrays of float32, float16 or bfloat16 (NumPy: or float64)
        Queries and keys of all sequences, concatenated, after convolution and activation; the op
        normalises them. Views whose last axis is contiguous are not copied. dk <= 256.
    v : (T, Hv, dv) array of q's dtype
        Hv is a multiple of Hk: value head h uses key head h // (Hv // Hk). dv <= 256.
    a : (T, Hv) or (T, Hv, dk) array of q's dtype
        Decay before its activation: one per head (gated delta net), or one per key channel (KDA).
    b : (T, Hv) array of q's dtype
        Update strength before its sigmoid.
    a_log : (Hv,) array of float32 (float64 for float64)
    dt_bias : (Hv,) or (Hv, dk) array of float32 (float64 for float64), like a
    states : (num_slots, Hv, dv, dk) array of float32 or bfloat16 (float64 for float64)
        Written in place; a head's state is the transpose of the papers' S. A view with any stride
        between slots.
    state_slots, cu_seqlens_q, context_lens, state_targets, snapshot_slots, snapshot_offsets
        Where states are read and written; see `causal_conv`. A snapshot's position in the sequence
        must be a multiple of 64, or its end.
    beta_scale : float
        1, or 2 to allow negative eigenvalues of the transition.
    scale : float, optional
        Factor on the normalised queries, by default dk**-0.5.
    gate_bound : float
        Lower bound of g, at most 0, with a gate per channel; 0 for none.
    eps : float
        Added to the sum of squares of a query or key.
    z : (T, Hv, dv) array of q's dtype, optional
        Gate of the output: return `gated_norm(out, z, norm_weight)`, for one token per sequence in
        the same launch. A view whose last axis is contiguous is not copied.
    norm_weight : (dv,) array of q's dtype, optional
        Given with `z`.
    norm_eps, norm_activation : float, str
        See `gated_norm`.
    max_seqlen_q : int, optional
        Upper bound of the sequences' numbers of tokens, by default T. It only saves launches.
    deterministic : bool
        Run the recurrence for sequences of any length: a token's result then does not depend on
        how its sequence is divided into calls, with float32 states.
    pdl : bool
        Programmatic dependent launch: the kernel reads the slots and the states early, so that no
        kernel that is still running may write these. This holds after `causal_conv`.
    out : (T, Hv, dv) array of q's dtype, optional
        Array for the result.

    Returns
    -------
    out : (T, Hv, dv) array of q's dtype

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument breaks the contract. Lengths and slots are checked on NumPy arrays; on the
        GPU a slot outside the states is not written, and reads as zeros.

    Notes
    -----
    For each token and value head, with q and k divided by sqrt(sum of squares + eps) [1]_:

        S = S e^g;  u = beta (v - S k);  S = S + u k^T;  out = scale S q

    with beta = beta_scale sigmoid(b), and g = -e^a_log softplus(a + dt_bias) or, with a bound,
    gate_bound sigmoid(e^a_log (a + dt_bias)). All of it is float32; a state is rounded when it is
    written, and out once. Sequences of at most 8 tokens, or of as many as `state_targets` has
    columns, run this recurrence. Longer ones run in chunks that end at multiples of 64 in the
    sequence, whose products have operands of q's dtype: float32, or 16 bits with float32 sums. A
    result depends on the sequence's own tokens only, so not on the rest of the batch.

    References
    ----------
    .. [1] Yang, Kautz, Hatamizadeh: Gated Delta Networks, arXiv:2412.06464; Kimi Team: Kimi Linear,
       arXiv:2510.26692.

    Examples
    --------
    >>> import numpy as np
    >>> one = np.ones((1, 1, 1), np.float32)
    >>> gates = {"a_log": np.zeros(1, np.float32), "dt_bias": np.zeros(1, np.float32)}
    >>> slots = {"states": np.zeros((1, 1, 1, 1), np.float32), "state_slots": np.zeros(1, np.int32)}
    >>> lens = {"cu_seqlens_q": np.array([0, 1], np.int32), "context_lens": np.ones(1, np.int32)}
    >>> zero = np.zeros((1, 1), np.float32)  # beta is 1/2
    >>> gated_delta(one, one, one, zero, zero, **gates, **slots, **lens, eps=0.0)
    array([[[0.5]]], dtype=float32)
    """
    call = Contract("gated_delta")
    q = call.array("q", q, "T Hk dk", MIRROR_FLOATS, layout="rows")
    k = call.array("k", k, "T Hk dk", q.dtype, layout="rows")
    v = call.array("v", v, "T Hv dv", q.dtype, layout="rows")
    gate_shape = "Hv" if getattr(a, "ndim", 2) == 2 else "Hv dk"
    a = call.array("a", a, f"T {gate_shape}", q.dtype, layout="rows")
    b = call.array("b", b, "T Hv", q.dtype, layout="rows")
    real = accumulation_dtype(q.dtype)
    a_log = call.array("a_log", a_log, "Hv", real)
    dt_bias = call.array("dt_bias", dt_bias, gate_shape, real)
    _check_heads(call)
    slots = StateSlots.checked(
        call,
        states,
        "Hv dv dk",
        FLOAT64 if real == FLOAT64 else (FLOAT32, BFLOAT16),
        call["T"],
        state_slots=state_slots,
        cu_seqlens_q=cu_seqlens_q,
        context_lens=context_lens,
        state_targets=state_targets,
        snapshot_slots=snapshot_slots,
        snapshot_offsets=snapshot_offsets,
    )
    arrays: dict[str, Any] = {
        "q": q,
        "k": k,
        "v": v,
        "a": a,
        "b": b,
        "a_log": a_log,
        "dt_bias": dt_bias,
    }
    numbers: dict[str, Any] = {
        "beta_scale": call.number("beta_scale", beta_scale),
        "scale": call["dk"] ** -0.5 if scale is None else call.number("scale", scale),
        "gate_bound": call.number("gate_bound", gate_bound),
        "eps": call.number("eps", eps, low=0.0),
    }
    ok = gate_bound == 0 or (gate_bound < 0 and a.ndim == 3)
    call.check("gate_bound", ok, "0, or negative with a gate per channel", gate_bound)
    norm = OutputNorm.checked(call, q.dtype, z, norm_weight, norm_eps, norm_activation)
    longest = call["T"]
    if max_seqlen_q is not None:
        starts = slots.arrays["cu_seqlens_q"]
        longest = min(longest, checked_longest(call, "max_seqlen_q", max_seqlen_q, starts))
    if call.on_cpu:
        call.check_target(out, v.shape, v.dtype)
        result = reference.gated_delta(**arrays, **slots.arrays, **numbers, **norm.mirror_args)
        return call.finish(out, result)
    out = call.output("out", out, v.shape, v.dtype)
    args = kernel_args(arrays, slots, norm, out, numbers)
    # Chunks write one state each; `state_targets` asks for the states after every token.
    step_limit = max(_MAX_STEPS, args["num_targets"])
    is_chunked = not deterministic and longest > step_limit and chunks.is_supported(args)
    max_steps = step_limit if is_chunked else longest
    is_normed = False
    if not (is_chunked and args["num_sequences"] == 1):
        has_norm = z is not None and not deterministic
        is_normed = steps.launch(
            args, max_seqlen_q=longest, max_steps=max_steps, has_norm=has_norm, pdl=pdl
        )
    if is_chunked:
        chunks.launch(args, max_steps=max_steps)
    if not is_normed:
        norm.apply(out)
    return out


def _check_heads(call: Contract) -> None:
    key_heads = call["Hk"]
    heads = call["Hv"]
    ok = key_heads > 0 and heads % key_heads == 0
    call.check("v", ok, f"of a multiple of {key_heads} heads, as q has", heads)
    for name in ("dk", "dv"):
        call.check(name, 0 < call[name] <= MAX_HEAD_DIM, f"from 1 to {MAX_HEAD_DIM}", call[name])
