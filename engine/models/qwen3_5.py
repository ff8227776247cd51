"""Qwen3.5 and 3.6: Qwen3-Next's layers with separate input projections, dense or with experts."""

from __future__ import annotations

from dataclasses import replace

from engine.models.family import TensorName
from engine.models.moe_family import MoeFamily
from engine.models.qwen3_next import (
    DELTA_NAMES,
    GATED_ATTENTION_NAMES,
    QWEN3_NEXT,
    QWEN3_NEXT_MLP_NAMES,
)

__all__ = ["QWEN3_5_MOE_TEXT", "QWEN3_5_TEXT"]

_DELTA = "model.layers.{i}.linear_attn"

_NAMES: tuple[TensorName, ...] = (
    *GATED_ATTENTION_NAMES,
    TensorName(f"{_DELTA}.in_proj_qkv.weight", "delta_in", "delta_q+delta_k+delta_v"),
    TensorName(f"{_DELTA}.in_proj_z.weight", "delta_in", "delta_z"),
    TensorName(f"{_DELTA}.in_proj_b.weight", "delta_in", "delta_b"),
    TensorName(f"{_DELTA}.in_proj_a.weight", "delta_in", "delta_a"),
    *DELTA_NAMES,
)

QWEN3_5_TEXT = replace(
    QWEN3_NEXT,
    model_type="qwen3_5_text",
    names=_NAMES,
    defaults={**QWEN3_NEXT.defaults, "num_key_value_heads": 4, "intermediate_size": 12288},
    moe=None,
    extra_layers="mtp_num_hidden_layers",
)

QWEN3_5_MOE_TEXT = replace(
    QWEN3_5_TEXT,
    model_type="qwen3_5_moe_text",
    names=(*_NAMES, *QWEN3_NEXT_MLP_NAMES),
    defaults={**QWEN3_NEXT.defaults, "num_experts_per_tok": 8},
    moe=MoeFamily(
        num_experts=256,
        width="moe_intermediate_size",
        shared_width="shared_expert_intermediate_size",
        shared_gate=True,
    ),
)
