"""Granite 3 MoE: granite with experts."""

from __future__ import annotations

from dataclasses import replace

from engine.models.expert_names import (
    GGUF_EXPERT_NAMES,
    GGUF_SHARED_EXPERT_NAMES,
    fused_expert_names,
    router_names,
)
from engine.models.family import GGUF_SPLIT_NAMES, Family, TensorName
from engine.models.granite import GRANITE, SINKS, WINDOWS
from engine.models.llama import LLAMA_NAMES
from engine.models.moe_family import MoeFamily

__all__ = ["GRANITEMOE", "GRANITEMOESHARED", "GRANITEMOE_SWA"]

_BLOCK = "block_sparse_moe"

GRANITEMOE = Family(
    model_type="granitemoe",
    names=(
        *LLAMA_NAMES,
        *router_names(f"{_BLOCK}.router.layer", f"{_BLOCK}.router"),
        *fused_expert_names(
            _BLOCK, "input_linear.weight", "output_linear.weight", form="published"
        ),
        *fused_expert_names(_BLOCK),
    ),
    gguf_names=(*GGUF_SPLIT_NAMES, *GGUF_EXPERT_NAMES),
    gguf_arch="granitemoe",
    gguf_interleaved_rope=True,
    defaults={**GRANITE.defaults, "num_experts_per_tok": 2},
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    multipliers=True,
    moe=MoeFamily(num_experts=8),
)

_SHARED = "model.layers.{i}.shared_mlp"

GRANITEMOESHARED = replace(
    GRANITEMOE,
    model_type="granitemoeshared",
    names=(
        *GRANITEMOE.names,
        TensorName(f"{_SHARED}.input_linear.weight", "shared_gate_up"),
        TensorName(f"{_SHARED}.output_linear.weight", "shared_down"),
    ),
    gguf_names=(*GRANITEMOE.gguf_names, *GGUF_SHARED_EXPERT_NAMES),
    gguf_arch="",  # its .gguf files declare "granitemoe"
    defaults={**GRANITEMOE.defaults, "shared_intermediate_size": 0},
    moe=MoeFamily(num_experts=8, shared_width="shared_intermediate_size"),
)
"""The same with a shared expert."""

GRANITEMOE_SWA = replace(
    GRANITEMOESHARED,
    model_type="granitemoe_swa",
    names=(*GRANITEMOESHARED.names, SINKS),
    gguf_names=(),
    gguf_interleaved_rope=False,
    defaults={**GRANITEMOESHARED.defaults, **WINDOWS},
    sinks=True,
    windows="pattern_from_first",
    rope_layers="layer_rope_theta",
)
"""The same with windows in most layers, attention sinks, and a base of rope per layer."""
