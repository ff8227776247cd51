"""Mamba-2's selective state space: `cuda_src/mamba2.cu`, `reference/mamba2.py`."""

from __future__ import annotations

import math
from typing import Any

from engine import reference
from engine.dtypes import BFLOAT16, accumulation_dtype, dtype_name
from engine.kernels._contract import FLOAT32, FLOAT64, MIRROR_FLOATS, Contract
from engine.kernels._elementwise import named_strides
from engine.kernels._launch import Kernel, ceil_div
from engine.kernels._module import ModuleSpec
from engine.kernels._state_slots import STATE_PARAMS, StateSlots

__all__ = ["mamba2", "specs"]

MAX_STATE_SIZE = 256
_THREADS = 128  # kThreads in CUDA
_ROWS_PER_BLOCK = 32  # kWarps * kRows in CUDA
_LANES = 32
_PARAMS = (
    f"{STATE_PARAMS} x:ptr x_stride_t:i64 x_stride_h:i64 dt:ptr dt_stride_t:i64 b:ptr "
    "b_stride_t:i64 b_stride_h:i64 c:ptr c_stride_t:i64 c_stride_h:i64 a_log:ptr d:ptr "
    "dt_bias:ptr out:ptr num_heads:i32 num_groups:i32 head_dim:i32 state_size:i32 dt_min:f32 "
    "dt_max:f32"
)
_KERNELS = {
    columns: Kernel(f"mamba2_{columns}", _PARAMS, struct="Mamba2Params") for columns in (2, 4, 8)
}


def specs(dtype: str, **_: Any) -> tuple[ModuleSpec, ...]:
    """Return the modules that the op may launch for `dtype`."""
    return tuple(_spec(dtype, state_dtype) for state_dtype in ("float32", "bfloat16"))


def _spec(dtype: str, state_dtype: str) -> ModuleSpec:
    return ModuleSpec("mamba2.cu", dtype, (("STATE_BF16", int(state_dtype == "bfloat16")),))


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
        Where states are read and written; see `causal_conv`.
    dt_min, dt_max : float
        Bounds of the time step.
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

    All of it is float32; a state is rounded when it is written, and out once. A result depends on
    the sequence's own tokens only. The time of a prompt grows with its longest sequence: the
    tokens of a sequence are computed one after the other.

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
    limits: dict[str, Any] = {"dt_min": call.number("dt_min", dt_min), "dt_max": float(dt_max)}
    arrays = {"x": x, "dt": dt, "b": b, "c": c, **gates}
    if call.on_cpu:
        return call.finish(out, reference.mamba2(**arrays, **slots.arrays, **limits))
    out = call.output("out", out, x.shape, x.dtype)
    _launch(arrays, slots, limits, out, pdl=pdl)
    return out


def _launch(
    arrays: dict[str, Any], slots: StateSlots, limits: dict[str, Any], out: Any, *, pdl: bool
) -> None:
    x = arrays["x"]
    b = arrays["b"]
    num_heads, head_dim = x.shape[1:]
    columns = next(one for one in _KERNELS if one * _LANES >= b.shape[2])
    strided = {name: arrays[name] for name in ("x", "b", "c")}
    _KERNELS[columns].launch(
        _spec(dtype_name(x.dtype), dtype_name(slots.states.dtype)),
        (slots.state_slots.shape[0], num_heads, ceil_div(head_dim, _ROWS_PER_BLOCK)),
        (_THREADS,),
        pdl=pdl,
        **arrays,
        **named_strides("th", **strided),
        **named_strides("t", dt=arrays["dt"]),
        **slots.args,
        **limits,
        out=out,
        num_heads=num_heads,
        num_groups=b.shape[1],
        head_dim=head_dim,
        state_size=b.shape[2],
    )
