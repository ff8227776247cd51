"""Solar Open: GLM-4.5's experts in every layer, whole heads rotated, no norms of q and k."""

from __future__ import annotations

from dataclasses import replace

from engine.models.glm4_moe import GLM4_EXPERTS, GLM4_MOE

__all__ = ["SOLAR_OPEN"]

SOLAR_OPEN = replace(
    GLM4_MOE,
    model_type="solar_open",
    gguf_names=(),
    gguf_arch="",
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "intermediate_size": 10240,  # unused: all layers have experts
        "moe_intermediate_size": 1280,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
    },
    qk_norm=False,
    extra_layers="",
    moe=replace(GLM4_EXPERTS, sparse_layers="all"),
)
