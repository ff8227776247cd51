"""Qwen1.5-MoE and Qwen2-MoE: qwen2 with experts, and a shared expert behind a gate."""

from __future__ import annotations

from engine.models.expert_names import (
    fused_expert_names,
    router_names,
    separate_expert_names,
    shared_expert_names,
)
from engine.models.family import Family
from engine.models.llama import LLAMA_NAMES
from engine.models.moe_family import MoeFamily

__all__ = ["QWEN2_MOE"]

QWEN2_MOE = Family(
    model_type="qwen2_moe",
    names=(
        *LLAMA_NAMES,
        *router_names("mlp.gate"),
        *separate_expert_names("mlp"),
        *fused_expert_names(),
        *shared_expert_names("mlp.shared_expert", gate="mlp.shared_expert_gate"),
    ),
    gguf_names=(),
    defaults={
        "num_key_value_heads": 16,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "intermediate_size": 5632,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts_per_tok": 4,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "qkv_bias": True,
    },
    qkv_bias="qkv_bias",
    windows="even_layers",
    moe=MoeFamily(
        num_experts=60,
        width="moe_intermediate_size",
        renormalize="norm_topk_prob",
        sparse_layers="steps",
        shared_width="shared_expert_intermediate_size",
        shared_gate=True,
    ),
)
