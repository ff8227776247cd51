"""Kernel arguments of Mamba-2's state space: `cuda_src/mamba2/mamba2_problem.cuh`."""

from __future__ import annotations

from typing import Any

from engine.kernels._elementwise import named_strides
from engine.kernels._state_slots import STATE_PARAMS, StateSlots

__all__ = ["PARAMS", "STATE_BITS", "kernel_args"]

STATE_BITS = {"float32": 32, "bfloat16": 16}
"""Dtypes of states, and the values of the macro."""

PARAMS = (
    f"{STATE_PARAMS} x:ptr x_stride_t:i64 x_stride_h:i64 dt:ptr dt_stride_t:i64 b:ptr "
    "b_stride_t:i64 b_stride_h:i64 c:ptr c_stride_t:i64 c_stride_h:i64 a_log:ptr d:ptr "
    "dt_bias:ptr out:ptr num_heads:i32 num_groups:i32 head_dim:i32 state_size:i32 max_steps:i32 "
    "dt_min:f32 dt_max:f32"
)
"""Parameters of every kernel of the family."""


def kernel_args(
    arrays: dict[str, Any], slots: StateSlots, limits: dict[str, float], out: Any
) -> dict[str, Any]:
    """Return the kernels' arguments, except those of a launch, from the op's checked ones."""
    num_heads, head_dim = arrays["x"].shape[1:]
    num_groups, state_size = arrays["b"].shape[1:]
    strided = {name: arrays[name] for name in ("x", "b", "c")}
    return {
        **arrays,
        **slots.args,
        **limits,
        **named_strides("th", **strided),
        **named_strides("t", dt=arrays["dt"]),
        "out": out,
        "num_heads": num_heads,
        "num_groups": num_groups,
        "head_dim": head_dim,
        "state_size": state_size,
    }
