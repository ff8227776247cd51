"""GLM-4.7-Flash: latent attention, sigmoid routing with a correction bias, a shared expert."""

from __future__ import annotations

from dataclasses import replace

from engine.models.deepseek import DEEPSEEK_V3

__all__ = ["GLM4_MOE_LITE"]

assert DEEPSEEK_V3.moe is not None

GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    model_type="glm4_moe_lite",
    defaults={
        **DEEPSEEK_V3.defaults,
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "intermediate_size": 10240,
        "moe_intermediate_size": 1536,
        "num_experts_per_tok": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.8,
    },
    moe=replace(DEEPSEEK_V3.moe, num_experts=64, lists_layers=True),
)
