"""Mellum 2: Qwen3-MoE with windows in some layers, and a rope of their own for these."""

from __future__ import annotations

from dataclasses import replace

from engine.models.moe_family import MoeFamily
from engine.models.qwen3_moe import QWEN3_MOE

__all__ = ["MELLUM"]

MELLUM = replace(
    QWEN3_MOE,
    model_type="mellum",
    gguf_names=(),
    gguf_arch="",
    defaults={
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "partial_rotary_factor": 1.0,
        "rope_parameters": {
            "full_attention": {"rope_theta": 5e5},
            "sliding_attention": {"rope_theta": 1e4},
        },
        "intermediate_size": 7168,
        "moe_intermediate_size": 896,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "sliding_window": 1024,
    },
    windows="layer_types",
    local_rope=True,
    extra_layers="num_nextn_predict_layers",
    moe=MoeFamily(
        num_experts=64,
        width="moe_intermediate_size",
        renormalize="norm_topk_prob",
        lists_layers=True,
    ),
)
