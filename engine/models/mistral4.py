"""Mistral Small 4: latent attention with queries that grow with their position, softmax routing."""

from __future__ import annotations

from dataclasses import replace

from engine.models.deepseek import DEEPSEEK_V3

__all__ = ["MISTRAL4"]

assert DEEPSEEK_V3.moe is not None

MISTRAL4 = replace(
    DEEPSEEK_V3,
    model_type="mistral4",
    defaults={
        **DEEPSEEK_V3.defaults,
        "max_position_embeddings": 1048576,
        "q_lora_rank": 1024,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "intermediate_size": 12288,
        "num_experts_per_tok": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 0,
        "routed_scaling_factor": 1.0,
        # A share of the rotated part; a smaller one is a share of the whole head.
        "partial_rotary_factor": 1.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 128.0,
            "original_max_position_embeddings": 8192,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 11,
    },
    q_scale=True,
    extra_layers="",
    mtp=None,
    moe=replace(
        DEEPSEEK_V3.moe, num_experts=128, score="softmax", correction=False, sums_groups=True
    ),
)
