"""Qwen3-MoE: qwen3 with experts."""

from __future__ import annotations

from engine.models.expert_names import (
    GGUF_EXPERT_NAMES,
    fused_expert_names,
    router_names,
    separate_expert_names,
)
from engine.models.family import GGUF_SPLIT_NAMES, Family
from engine.models.llama import LLAMA_NAMES
from engine.models.moe_family import MoeFamily

__all__ = ["QWEN3_MOE"]

QWEN3_MOE = Family(
    model_type="qwen3_moe",
    names=(
        *LLAMA_NAMES,
        *router_names("mlp.gate"),
        *separate_expert_names("mlp"),
        *fused_expert_names(),
    ),
    gguf_names=(*GGUF_SPLIT_NAMES, *GGUF_EXPERT_NAMES),
    gguf_arch="qwen3moe",
    defaults={
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "sliding_window": 4096,
    },
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm=True,
    windows="switched",
    moe=MoeFamily(
        num_experts=128,
        width="moe_intermediate_size",
        renormalize="norm_topk_prob",
        gguf_renormalize=True,
        sparse_layers="steps",
    ),
)
