"""Checkpoint names of the tensors of experts, router and shared expert."""

from __future__ import annotations

from engine.models.family import TensorName
from engine.models.tensor_layout import ROWS, Layout

__all__ = ["GGUF_EXPERT_NAMES", "GGUF_SHARED_EXPERT_NAMES"]
__all__ += [
    "correction_names",
    "fused_expert_names",
    "router_names",
    "separate_expert_names",
    "shared_expert_names",
]


GGUF_EXPERT_NAMES: tuple[TensorName, ...] = (
    TensorName("blk.{i}.ffn_gate_inp.weight", "router"),
    TensorName("blk.{i}.ffn_gate_exps.weight", "experts_gate_up", "expert_gate"),
    TensorName("blk.{i}.ffn_up_exps.weight", "experts_gate_up", "expert_up"),
    TensorName("blk.{i}.ffn_down_exps.weight", "experts_down"),
)
"""Names of router and experts in a .gguf."""

GGUF_SHARED_EXPERT_NAMES: tuple[TensorName, ...] = (
    TensorName("blk.{i}.exp_probs_b.bias", "router_correction"),
    TensorName("blk.{i}.ffn_gate_shexp.weight", "shared_gate_up", "shared_gate"),
    TensorName("blk.{i}.ffn_up_shexp.weight", "shared_gate_up", "shared_up"),
    TensorName("blk.{i}.ffn_down_shexp.weight", "shared_down"),
)
"""Names of the router's correction and of the shared expert in a .gguf."""


def router_names(*names: str) -> tuple[TensorName, ...]:
    """Name the router's tensor; a checkpoint uses one of `names`."""
    return tuple(
        TensorName(f"model.layers.{{i}}.{name}.weight", "router", form=name) for name in names
    )


def correction_names(*names: str, layout: Layout = ROWS) -> tuple[TensorName, ...]:
    """Name the correction of the router's choice; a checkpoint uses one of `names`."""
    return tuple(
        TensorName(f"model.layers.{{i}}.{name}", "router_correction", "", layout, name)
        for name in names
    )


def separate_expert_names(
    block: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> tuple[TensorName, ...]:
    """Name the three matrices of every expert in `block`."""
    expert = f"model.layers.{{i}}.{block}.experts.{{e}}"
    form = "separate"
    return (
        TensorName(f"{expert}.{gate}.weight", "experts_gate_up", "expert_gate", form=form),
        TensorName(f"{expert}.{up}.weight", "experts_gate_up", "expert_up", form=form),
        TensorName(f"{expert}.{down}.weight", "experts_down", form=form),
    )


def fused_expert_names(
    block: str = "mlp",
    gate_up: str = "experts.gate_up_proj",
    down: str = "experts.down_proj",
    *,
    layout: Layout = ROWS,
    gate_up_layout: Layout | None = None,
    form: str = "fused",
) -> tuple[TensorName, ...]:
    """Name the two tensors with the matrices of all experts in `block` ("": in the layer itself).

    The defaults are the names that transformers 5 writes with ``save_original_format=False``.
    """
    prefix = f"model.layers.{{i}}.{block}." if block else "model.layers.{i}."
    rows = gate_up_layout or layout
    return (
        TensorName(f"{prefix}{gate_up}", "experts_gate_up", "", rows, form),
        TensorName(f"{prefix}{down}", "experts_down", "", layout, form),
    )


def shared_expert_names(block: str, gate: str = "", *, form: str = "") -> tuple[TensorName, ...]:
    """Name the tensors of the shared expert, and of its gate unless `gate` is empty.

    `form`: see `TensorName`.
    """
    matrices = (
        ("gate_proj", "shared_gate_up", "shared_gate"),
        ("up_proj", "shared_gate_up", "shared_up"),
        ("down_proj", "shared_down", ""),
    )
    names = tuple(
        TensorName(
            f"model.layers.{{i}}.{block}.{matrix}.{tensor}", f"{kind}{suffix}", part, form=form
        )
        for matrix, kind, part in matrices
        for tensor, suffix in (("weight", ""), ("bias", "_bias"))
    )
    if not gate:
        return names
    return (*names, TensorName(f"model.layers.{{i}}.{gate}.weight", "shared_gate"))
