"""Kernel arguments of the gated delta rule: `cuda_src/gated_delta/gated_delta_problem.cuh`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.kernels._contract import Contract
from engine.kernels._elementwise import named_strides
from engine.kernels._state_slots import STATE_PARAMS, StateSlots
from engine.kernels.gated_norm import ACTIVATIONS, gated_norm

__all__ = ["PARAMS", "STATE_BITS", "OutputNorm", "kernel_args"]

STATE_BITS = {"float32": 32, "bfloat16": 16}
"""Dtypes of states, and the values of the macro."""

PARAMS = (
    f"{STATE_PARAMS} q:ptr k:ptr v:ptr a:ptr b:ptr a_log:ptr dt_bias:ptr out:ptr q_stride_t:i64 "
    "q_stride_h:i64 k_stride_t:i64 k_stride_h:i64 v_stride_t:i64 v_stride_h:i64 a_stride_t:i64 "
    "a_stride_h:i64 b_stride_t:i64 num_key_heads:i32 num_heads:i32 key_dim:i32 value_dim:i32 "
    "max_steps:i32 beta_scale:f32 scale:f32 eps:f32 gate_bound:f32 z:ptr norm_weight:ptr "
    "z_stride_t:i64 z_stride_h:i64 norm_eps:f32 norm_is_silu:i32 scratch:ptr first_chunk:i32 "
    "num_chunks:i32 max_chunks:i32 launch:i32"
)
"""Parameters of every kernel of the family."""


@dataclass(frozen=True)
class OutputNorm:
    """The gated norm of the output; without `z` there is none. See `gated_norm`."""

    z: Any
    weight: Any
    eps: float
    activation: str

    @classmethod
    def checked(
        cls, call: Contract, dtype: Any, z: Any, weight: Any, eps: float, activation: str
    ) -> OutputNorm:
        """Check the arguments; z has the output's shape."""
        is_paired = (z is None) == (weight is None)
        call.check("norm_weight", is_paired, "given with z", "one of the two")
        if z is not None:
            z = call.array("z", z, "T Hv dv", dtype, layout="rows")
            weight = call.array("norm_weight", weight, "dv", dtype)
        eps = call.number("norm_eps", eps, low=0.0)
        call.check(
            "norm_activation", activation in ACTIVATIONS, f"one of {ACTIVATIONS}", activation
        )
        return cls(z, weight, eps, activation)

    @property
    def mirror_args(self) -> dict[str, Any]:
        """The mirror's keyword arguments."""
        names = {"norm_weight": self.weight, "norm_eps": self.eps}
        return {"z": self.z, **names, "norm_activation": self.activation}

    @property
    def args(self) -> dict[str, Any]:
        """The kernels' arguments."""
        strides = {"z_stride_t": 0, "z_stride_h": 0}
        if self.z is not None:
            strides = named_strides("th", z=self.z)
        return {
            "z": self.z,
            **strides,
            "norm_weight": self.weight,
            "norm_eps": self.eps,
            "norm_is_silu": self.activation == "silu",
        }

    def apply(self, out: Any) -> None:
        """Normalise `out` in place, if there is a norm, by a launch of its own."""
        if self.z is not None:
            options: dict[str, Any] = {"eps": self.eps, "activation": self.activation}
            gated_norm(out, self.z, self.weight, **options, out=out)


def kernel_args(
    arrays: dict[str, Any],
    slots: StateSlots,
    norm: OutputNorm,
    out: Any,
    numbers: dict[str, float],
) -> dict[str, Any]:
    """Return the kernels' arguments, except those of a launch, from the op's checked ones."""
    k = arrays["k"]
    v = arrays["v"]
    strided = {name: arrays[name] for name in ("q", "k", "v", "a")}
    return {
        **arrays,
        **slots.args,
        **norm.args,
        **numbers,
        **named_strides("th", **strided),
        **named_strides("t", b=arrays["b"]),
        "out": out,
        "num_key_heads": k.shape[1],
        "num_heads": v.shape[1],
        "key_dim": k.shape[2],
        "value_dim": v.shape[2],
    }
