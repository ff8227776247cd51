"""The tiny golden models with lightning attention, read by `make_lightning.py` only."""

from __future__ import annotations

from typing import Any

__all__ = ["LIGHTNING"]

_TINY: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-4,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "layer_group_size": 2,  # the last layer is the rest of a group
    "group_norm_size": 2,
    "linear_silu": False,
    "use_qk_norm": True,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
    "norm_topk_prob": True,
    "moe_router_enable_expert_bias": True,
    "score_function": "sigmoid",
    "num_nextn_predict_layers": 0,
}
_NEW = {key: value for key, value in _TINY.items() if key != "score_function"}
_LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
    "rope_interleave": True,
    "partial_rotary_factor": 0.5,
}

LIGHTNING: dict[str, dict[str, Any]] = {
    "bailing_moe_v2_5": {
        **_TINY,
        **_LATENT,
        "model_type": "bailing_hybrid",
        "rope_theta": 500.0,
        "rope_scaling": None,
    },
    "bailing_moe_v2_5_new_keys": {
        **_NEW,
        **_LATENT,
        "model_type": "bailing_hybrid",
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "group_norm_size": 1,
        "layer_group_size": 3,
        "q_lora_rank": None,
        "use_qk_norm": False,
        "num_shared_experts": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 900.0},
    },
    "bailing_moe_linear": {
        **_TINY,
        "model_type": "bailing_moe_linear",
        "partial_rotary_factor": 0.5,
        "rope_theta": 500.0,
    },
    "bailing_moe_linear_new_keys": {
        **_NEW,
        "model_type": "bailing_moe_linear",
        "num_attention_heads": 6,
        "head_dim": 16,
        "layer_group_size": 3,
        "use_qk_norm": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 900.0,
            "partial_rotary_factor": 0.25,
        },
    },
}
