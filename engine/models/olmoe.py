"""OLMoE: llama with experts, and QK-norm over all heads of q or k together."""

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

__all__ = ["OLMOE"]

OLMOE = Family(
    model_type="olmoe",
    names=(
        *LLAMA_NAMES,
        *router_names("mlp.gate"),
        *separate_expert_names("mlp"),
        *fused_expert_names(),
    ),
    gguf_names=(*GGUF_SPLIT_NAMES, *GGUF_EXPERT_NAMES),
    gguf_arch="olmoe",
    defaults={
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "num_experts_per_tok": 8,
        "clip_qkv": None,
        "eos_token_id": 50279,
        "pad_token_id": 1,
    },
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm=True,
    whole_qk_norm=True,
    moe=MoeFamily(num_experts=64, renormalize="norm_topk_prob"),
)
