"""New tokens of attention_decode for fused RoPE and KV append: checks and launch arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.kernels._attention import are_aligned
from engine.kernels._contract import FLOAT32, INT32, INT64, Contract
from engine.kernels._elementwise import element_strides

__all__ = ["NO_NEW_TOKENS", "PARAMS", "NewTokens"]

PARAMS = (
    "new_k:ptr new_v:ptr positions:ptr cos_sin:ptr slot_mapping:ptr q_weight:ptr k_weight:ptr "
    "k_stride_b:i64 k_stride_h:i64 v_stride_b:i64 v_stride_h:i64 num_positions:i32 eps:f32 "
    "weight_offset:f32"
)
NO_NEW_TOKENS: dict[str, Any] = {
    name: None if kind == "ptr" else 0
    for name, kind in (item.split(":") for item in PARAMS.split())
}
"""Values of `PARAMS` for a kernel compiled without new tokens."""


@dataclass(frozen=True)
class NewTokens:
    """Keys and values (B, 1, K, D) of the new tokens, and the norm and rotation of q and k.

    Names and formulas follow `qk_norm_rope_store`.
    """

    k: Any
    v: Any
    positions: Any
    cos_sin: Any
    slot_mapping: Any
    q_weight: Any
    k_weight: Any
    eps: float
    weight_offset: float

    @classmethod
    def checked(cls, call: Contract, dtype: Any, **given: Any) -> NewTokens | None:
        """Check the arguments for fused RoPE and KV append; return None if none is given."""
        needed = ("k", "v", "positions", "cos_sin", "slot_mapping")
        is_given = [given[name] is not None for name in needed]
        if not any(is_given):
            for name in ("q_weight", "k_weight"):
                call.check(name, given[name] is None, "None without k", "an array")
            return None
        if not all(is_given):
            missing = needed[is_given.index(False)]
            call.check(missing, False, f"an array: {', '.join(needed)} belong together", None)
        call.check("Q", call["Q"] == 1, "1 with k", call["Q"])
        for name, shape, kind, layout in (
            ("k", "B 1 K D", dtype, "rows"),
            ("v", "B 1 K D", dtype, "rows"),
            ("positions", "B", INT32, "C"),
            ("cos_sin", "num_positions R", FLOAT32, "C"),
            ("slot_mapping", "B", INT64, "C"),
            ("q_weight", "D", dtype, "C"),
            ("k_weight", "D", dtype, "C"),
        ):
            if given[name] is not None:
                given[name] = call.array(name, given[name], shape, kind, layout=layout)
        call.number("eps", given["eps"], low=0.0)
        call.number("weight_offset", given["weight_offset"])
        if call["R"] % 2 or call["R"] > call["D"]:
            wanted = f"(P, R), R even and at most D = {call['D']}"
            call.check("cos_sin", False, wanted, given["cos_sin"].shape)
        if call.on_cpu:
            _check_range(call, "positions", given["positions"], 0, call["num_positions"])
            num_slots = call["P"] * call["block_size"]
            _check_range(call, "slot_mapping", given["slot_mapping"], -1, num_slots)
        return cls(**given)

    def are_vectors(self) -> bool:
        """Tell whether all rows are 16-byte aligned and whole heads are rotated."""
        arrays = [self.k, self.v, self.cos_sin, self.q_weight, self.k_weight]
        is_whole = int(self.cos_sin.shape[1]) == int(self.k.shape[3])
        return is_whole and are_aligned(*(a for a in arrays if a is not None))

    def launch_arguments(self) -> dict[str, Any]:
        """Return the kernel arguments named in `PARAMS`."""
        k_strides = element_strides(self.k)
        v_strides = element_strides(self.v)
        return {
            "new_k": self.k,
            "new_v": self.v,
            "positions": self.positions,
            "cos_sin": self.cos_sin,
            "slot_mapping": self.slot_mapping,
            "q_weight": self.q_weight,
            "k_weight": self.k_weight,
            "k_stride_b": k_strides[0],
            "k_stride_h": k_strides[2],
            "v_stride_b": v_strides[0],
            "v_stride_h": v_strides[2],
            "num_positions": self.cos_sin.shape[0],
            "eps": self.eps,
            "weight_offset": self.weight_offset,
        }


def _check_range(call: Contract, name: str, values: Any, first: int, end: int) -> None:
    found = values.tolist()
    if found and not (first <= min(found) and max(found) < end):
        call.check(name, False, f"from {first} to {end - 1}", (min(found), max(found)))
