"""The tiny golden models with latent attention, read by `make.py` only; see `cases.py`."""

from __future__ import annotations

from typing import Any

__all__ = ["LATENTS"]

_TINY: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "q_lora_rank": 24,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
}
_EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
}
_YARN = {
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "mscale": 0.9,
    "mscale_all_dim": 0.6,
}
_V2 = {**_TINY, **_EXPERTS, "model_type": "deepseek_v2"}
_V3 = {**_TINY, **_EXPERTS, "model_type": "deepseek_v3", "n_group": 4, "topk_group": 2}
_LONGCAT = {key: value for key, value in _TINY.items() if key != "num_hidden_layers"}
_LONGCAT |= {
    "model_type": "longcat_flash",
    "num_layers": 2,
    "n_routed_experts": 5,
    "zero_expert_num": 3,
    "moe_topk": 4,
    "expert_ffn_hidden_size": 20,
    "ffn_hidden_size": 96,
    "routed_scaling_factor": 1.7,
    "head_dim": 8,  # of the rope
}
del _LONGCAT["intermediate_size"]
_LITE = {**_TINY, **_EXPERTS, "model_type": "glm4_moe_lite"}

LATENTS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {  # queries without a latent, greedy choice: V2-Lite
        **_V2,
        "q_lora_rank": None,
        "topk_method": "greedy",
        "rope_theta": 500.0,
        "rope_scaling": {"type": "yarn", **_YARN},
    },
    "deepseek_v2_new_keys_groups": {
        **_V2,
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "group_limited_greedy",
        "attention_bias": True,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
    "deepseek_v2_groups_unused": {  # greedy choice by default
        **_V2,
        "n_group": 4,
        "topk_group": 1,
        "rope_theta": 500.0,
    },
    "deepseek_v3": {
        **_V3,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "rope_theta": 500.0,
        "rope_scaling": {"type": "yarn", **_YARN},
    },
    "deepseek_v3_new_keys": {
        **_V3,
        "v_head_dim": 20,
        "norm_topk_prob": False,
        "attention_bias": True,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 500.0, **_YARN, "mscale": 0.6},
    },
    "deepseek_v3_half_order": {
        **_V3,
        "rope_interleave": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
    "glm4_moe_lite": {
        **_LITE,
        "v_head_dim": 20,
        "mlp_layer_types": ["sparse", "dense", "sparse"],
        "rope_theta": 500.0,
    },
    "glm4_moe_lite_new_keys": {
        **_LITE,
        "n_shared_experts": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 900.0},
    },
    "longcat_flash": {**_LONGCAT, "rope_theta": 500.0, "router_bias": False},
    "longcat_flash_new_keys_yarn_biases": {
        **_LONGCAT,
        "v_head_dim": 20,
        "zero_expert_num": 6,
        "attention_bias": True,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 500.0, **_YARN, "mscale": 0.6},
    },
    "minicpm3": {
        **_TINY,
        "model_type": "minicpm3",
        "scale_emb": 3.3,
        "scale_depth": 0.9,
        "dim_model_base": 40,
        "rope_theta": 500.0,
    },
    "minicpm3_new_keys_biases_longrope": {
        **_TINY,
        "model_type": "minicpm3",
        "q_lora_rank": 20,
        "scale_emb": 2.2,
        "scale_depth": 1.3,
        "dim_model_base": 96,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 500.0,
            "short_factor": [1.0, 1.1, 1.3, 1.6],
            "long_factor": [1.5, 2.0, 3.0, 4.0],
            "original_max_position_embeddings": 16,
        },
    },
    "mistral4": {
        **_V3,
        "model_type": "mistral4",
        "norm_topk_prob": True,
        "rope_scaling": {"type": "yarn", "rope_theta": 500.0, **_YARN, "llama_4_scaling_beta": 0.6},
    },
    "mistral4_new_keys_biases": {
        **_V3,
        "model_type": "mistral4",
        "v_head_dim": 20,
        "norm_topk_prob": False,
        "attention_bias": True,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 500.0,
            **_YARN,
            "mscale": 0.6,
            "llama_4_scaling_beta": 0.4,
            "partial_rotary_factor": 0.4,
        },
    },
    "youtu": {**_TINY, "model_type": "youtu", "tie_word_embeddings": True, "rope_theta": 500.0},
    "youtu_new_keys": {
        **_TINY,
        "model_type": "youtu",
        "q_lora_rank": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 900.0},
    },
}
