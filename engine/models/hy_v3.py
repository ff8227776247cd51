"""Hy3: Qwen3's attention, experts with sigmoid routing, a correction and a shared expert."""

from __future__ import annotations

from engine.models.expert_names import (
    correction_names,
    fused_expert_names,
    router_names,
    separate_expert_names,
    shared_expert_names,
)
from engine.models.family import Family
from engine.models.llama import LLAMA_NAMES
from engine.models.moe_family import MoeFamily

__all__ = ["HY_V3"]

HY_V3 = Family(
    model_type="hy_v3",
    names=(
        *LLAMA_NAMES,
        *router_names("mlp.router.gate", "mlp.gate"),
        *correction_names("mlp.expert_bias", "mlp.e_score_correction_bias"),
        *separate_expert_names("mlp"),
        *fused_expert_names(),
        *shared_expert_names("mlp.shared_mlp", form="published"),
        *shared_expert_names("mlp.shared_experts", form="fused"),
    ),
    gguf_names=(),
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 11158840.0,
        "moe_intermediate_size": 1536,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "router_scaling_factor": 2.826,
        "num_nextn_predict_layers": 1,
    },
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    mlp_bias="mlp_bias",
    qk_norm=True,
    extra_layers="num_nextn_predict_layers",
    moe=MoeFamily(
        num_experts=192,
        width="moe_intermediate_size",
        sparse_layers="after_first",
        lists_layers=True,
        score="sigmoid",
        correction=True,
        scale="router_scaling_factor",
        shared_count="num_shared_experts",
        shared_bias="mlp_bias",
    ),
)
