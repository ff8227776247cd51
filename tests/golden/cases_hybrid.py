"""The tiny golden models of hybrids, read by `make.py` only; see `cases.py`."""

from __future__ import annotations

from typing import Any

__all__ = ["HYBRIDS"]

_TINY: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 3,
}
_EXPERTS = {
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
}
_NEXT = {**_TINY, **_EXPERTS, "model_type": "qwen3_next"}
_NEW_ROPE = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
_MROPE = {**_NEW_ROPE, "mrope_section": [2, 2, 2], "mrope_interleaved": True}
_TYPES = ["full_attention", "linear_attention", "linear_attention", "full_attention"]

_LFM2 = {
    **{key: value for key, value in _TINY.items() if not key.startswith("linear_")},
    "model_type": "lfm2",
    "norm_eps": 1e-4,
    "conv_L_cache": 4,
}
for key in ("rms_norm_eps", "hidden_act", "head_dim"):
    del _LFM2[key]

_LFM3 = {
    **{key: value for key, value in _LFM2.items() if key != "conv_L_cache"},
    "model_type": "lfm3",
    "head_dim": 24,
    "num_hidden_layers": 5,
    "sliding_window": 8,
    "layer_types": [
        *("conv", "sliding_attention", "full_attention", "conv", "sliding_attention"),
    ],
}

_GRANITE = {
    **{key: value for key, value in _TINY.items() if not key.startswith("linear_")},
    "model_type": "granitemoehybrid",
    "embedding_multiplier": 3.3,
    "residual_multiplier": 0.3,
    "attention_multiplier": 0.4,
    "logits_scaling": 0.7,
    "mamba_n_heads": 8,
    "mamba_expand": 1,
    "mamba_n_groups": 2,
    "mamba_d_state": 10,
    "mamba_d_conv": 3,
    "shared_intermediate_size": 28,
}
del _GRANITE["head_dim"]

_NEMOTRON_H = {
    **{key: value for key, value in _TINY.items() if not key.startswith("linear_")},
    "model_type": "nemotron_h",
    "layer_norm_epsilon": 1e-4,
    "mlp_hidden_act": "relu2",
    "mamba_num_heads": 6,
    "mamba_head_dim": 12,
    "n_groups": 2,
    "ssm_state_size": 10,
    "conv_kernel": 3,
    "time_step_min": 1e-6,
}
for key in ("rms_norm_eps", "hidden_act", "num_hidden_layers"):
    del _NEMOTRON_H[key]

_NEMOTRON_EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "routed_scaling_factor": 1.7,
    "n_group": 4,
    "topk_group": 2,
}

_FALCON_H1 = {
    **{key: value for key, value in _TINY.items() if not key.startswith("linear_")},
    "model_type": "falcon_h1",
    "mamba_d_ssm": 72,
    "mamba_n_heads": 6,
    "mamba_n_groups": 2,
    "mamba_d_state": 10,
    "mamba_d_conv": 3,
    "embedding_multiplier": 3.3,
    "lm_head_multiplier": 1.9,
    "key_multiplier": 0.7,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.8,
    "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.6,
    "ssm_multipliers": [0.9, 1.4, 0.7, 1.6, 0.8],
    "mlp_multipliers": [0.75, 1.25],
}
_BAMBA = {
    **{key: value for key, value in _TINY.items() if not key.startswith(("linear_", "head_"))},
    "model_type": "bamba",
    "attn_layer_indices": [1, 3],
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 10,
    "mamba_d_conv": 3,
}
_OLMO = {key: value for key, value in _TINY.items() if not key.startswith("linear_")}
_OLMO |= {"model_type": "olmo_hybrid", "rms_norm_eps": 1e-3}
del _OLMO["head_dim"]

_LATENT = {
    **{key: value for key, value in _TINY.items() if not key.startswith(("linear_", "head_"))},
    "num_key_value_heads": 4,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "moe_intermediate_size": 20,
    "num_experts": 8,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
}
_KIMI = {
    **{key: value for key, value in _LATENT.items() if key != "max_position_embeddings"},
    "model_type": "kimi_linear",
    "model_max_length": 64,
    "num_expert_group": 4,
    "num_experts_per_token": 3,
    "num_shared_experts": 2,
}

_BAILING = {
    **_LATENT,
    "model_type": "bailing_hybrid",
    "layer_group_size": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
}

_TOWER = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "patch_size": 4}
_TOWER |= {"out_hidden_size": 64, "num_position_embeddings": 4}

HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        **_NEXT,
        "full_attention_interval": 2,
        "norm_topk_prob": False,
        "decoder_sparse_step": 2,
        "rope_theta": 500.0,
        "partial_rotary_factor": 0.5,
    },
    "qwen3_next_new_keys_biases": {
        **_NEXT,
        "layer_types": _TYPES,
        "attention_bias": True,
        "tie_word_embeddings": True,
        "linear_num_value_heads": 2,
        "linear_conv_kernel_dim": 4,
        "mlp_only_layers": [1],
        "rope_parameters": _NEW_ROPE,
    },
    "qwen3_5_text": {  # three of four layers are linear, and a quarter of a head is rotated
        **_TINY,
        "model_type": "qwen3_5_text",
        "head_dim": 32,
        "rope_theta": 500.0,
    },
    "qwen3_5_text_new_keys_tied": {
        **_TINY,
        "model_type": "qwen3_5_text",
        "layer_types": _TYPES,
        "attention_bias": True,
        "tie_word_embeddings": True,
        "rope_parameters": _MROPE,
    },
    "qwen3_5_moe_text": {
        **_TINY,
        **_EXPERTS,
        "model_type": "qwen3_5_moe_text",
        "full_attention_interval": 3,
        "rope_parameters": _MROPE,
    },
    "lfm2": {
        **_LFM2,
        "full_attn_idxs": [2],
        "block_ff_dim": 100,
        "block_ffn_dim_multiplier": 1.3,
        "block_multiple_of": 16,
        "tie_embedding": False,
        "rope_theta": 500.0,
    },
    "lfm2_new_keys_biases": {
        **_LFM2,
        "layer_types": ["conv", "full_attention", "conv", "conv"],
        "block_auto_adjust_ff_dim": False,
        "conv_bias": True,
        "conv_L_cache": 3,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
    "lfm2_moe": {
        **_LFM2,
        "model_type": "lfm2_moe",
        "layer_types": ["conv", "full_attention", "conv", "conv"],
        "num_dense_layers": 1,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "routed_scaling_factor": 1.7,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
    "lfm2_moe_no_bias": {
        **_LFM2,
        "model_type": "lfm2_moe",
        "layer_types": ["full_attention", "conv", "conv", "full_attention"],
        "num_dense_layers": 2,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "use_expert_bias": False,
        "norm_topk_prob": False,
        "rope_theta": 500.0,
    },
    "granitemoehybrid": {
        **_GRANITE,
        "intermediate_size": 24,
        "layers_block_type": ["mamba", "attention", "mamba", "attention"],
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
    },
    "granitemoehybrid_dense_rope_biases": {
        **_GRANITE,
        "layer_types": ["linear_attention", "full_attention", *["linear_attention"] * 2],
        "num_local_experts": 0,
        "mamba_n_groups": 1,
        "mamba_d_head": 8,
        "mamba_d_conv": 4,
        "mamba_conv_bias": False,
        "mamba_proj_bias": True,
        "attention_bias": True,
        "position_embedding_type": "rope",
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
    "nemotron_h": {**_NEMOTRON_H, "hybrid_override_pattern": "M-*M-"},
    "nemotron_h_new_keys_biases": {
        **_NEMOTRON_H,
        "layers_block_type": ["full_attention", "mlp", "linear_attention", "mlp"],
        "use_conv_bias": False,
        "use_bias": True,
        "mlp_bias": True,
        "conv_kernel": 4,
    },
    "nemotron_h_experts": {
        **_NEMOTRON_H,
        **_NEMOTRON_EXPERTS,
        "hybrid_override_pattern": "ME*E-",
        "moe_shared_expert_intermediate_size": 28,
    },
    "nemotron_h_experts_latent_new_keys_biases": {
        **_NEMOTRON_H,
        **_NEMOTRON_EXPERTS,
        "layers_block_type": ["moe", "full_attention", "linear_attention", "moe"],
        "moe_shared_expert_intermediate_size": 36,
        "moe_latent_size": 32,
        "norm_topk_prob": False,
        "attention_bias": True,  # there are none
        "mlp_bias": True,
    },
    "falcon_h1": {**_FALCON_H1, "rope_theta": 500.0},
    "falcon_h1_new_keys_norm_biases": {
        **_FALCON_H1,
        "mamba_d_ssm": None,
        "mamba_d_head": 16,
        "mamba_n_heads": 8,
        "mamba_d_conv": 4,
        "mamba_rms_norm": True,
        "mamba_conv_bias": False,
        "mamba_proj_bias": True,
        "projectors_bias": True,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
    "falcon_h1_gate_first": {
        **_FALCON_H1,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
        "projectors_bias": True,
    },
    "lfm3": {
        **_LFM3,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 70.0},
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 500.0,
                "partial_rotary_factor": 0.5,
            },
        },
    },
    "lfm3_plain_biases": {
        **_LFM3,
        "conv_L_cache": 5,
        "conv_bias": True,
        "attention_bias": True,
        "use_sandwich_norm": False,
        "use_attention_gate": False,
        "tie_word_embeddings": True,
    },
    "bamba": {**_BAMBA, "rope_theta": 500.0},
    "bamba_new_keys_biases": {
        **_BAMBA,
        "head_dim": 24,
        "mamba_d_head": 16,
        "mamba_expand": 1,
        "mamba_n_heads": 4,
        "mamba_conv_bias": False,
        "mamba_proj_bias": True,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "rope_parameters": _NEW_ROPE,
    },
    "olmo_hybrid": {
        **_OLMO,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "rope_theta": None,
    },
    "olmo_hybrid_new_keys_rope_biases": {
        **_OLMO,
        "layer_types": _TYPES,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "linear_conv_kernel_dim": 3,
        "linear_allow_neg_eigval": False,
        "attention_bias": True,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
    "kimi_linear": {
        **_KIMI,
        "first_k_dense_replace": 1,
        "head_dim": 16,
        "q_lora_rank": None,
        "linear_attn_config": {
            "full_attn_layers": [2, 4],
            "kda_layers": [1, 3],
            "head_dim": 10,
            "num_heads": 6,
            "short_conv_kernel_size": 3,
        },
        "mla_use_nope": True,
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_nextn_predict_layers": 0,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "use_grouped_topk": True,
    },
    "kimi_linear_new_keys": {
        **_KIMI,
        "layer_types": _TYPES,
        "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
        "linear_head_dim": 8,
        "linear_num_heads": 2,
        "linear_conv_kernel_dim": 4,
        "q_lora_rank": 24,
        "moe_renormalize": False,
        "num_shared_experts": 1,
        "rope_parameters": None,
    },
    "bailing_hybrid": {
        **_BAILING,
        "head_dim": 12,
        "short_conv_kernel_size": 3,
        "no_kda_lora": True,
        "kda_safe_gate": True,
        "kda_lower_bound": -3.0,
        "gated_attention_proj_granularity_type": "head_wise",
        "num_experts_per_tok": 3,
        "num_shared_experts": 2,
        "n_group": 4,
        "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "num_nextn_predict_layers": 0,
        "rope_theta": 500.0,
        "rope_interleave": True,
    },
    "bailing_hybrid_new_keys": {
        **_BAILING,
        "layer_types": _TYPES,
        "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
        "head_dim": 8,
        "linear_head_dim": 10,
        "linear_num_heads": 4,
        "linear_conv_kernel_dim": 4,
        "short_conv_kernel_size": 4,
        "kda_safe_gate": False,
        "q_lora_rank": None,
        "num_experts_per_token": 3,
        "num_shared_experts": 1,
        "num_expert_group": 4,
        "moe_renormalize": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
    "qwen3_5": {
        "model_type": "qwen3_5",
        "tie_word_embeddings": False,
        "vision_config": _TOWER,
        "text_config": {
            **{key: value for key, value in _TINY.items() if key != "tie_word_embeddings"},
            "model_type": "qwen3_5_text",
            "layer_types": _TYPES,
            "rope_parameters": _MROPE,
        },
    },
    "qwen3_5_moe": {
        "model_type": "qwen3_5_moe",
        "tie_word_embeddings": False,
        "vision_config": _TOWER,
        "text_config": {
            **_TINY,
            **_EXPERTS,
            "model_type": "qwen3_5_moe_text",
            "layer_types": _TYPES,
            "rope_parameters": _MROPE,
        },
    },
}
