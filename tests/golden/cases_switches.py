"""Tiny golden models of families that differ from others in switches only. See `cases.py`."""

from __future__ import annotations

from typing import Any

from cases import _MOE, _TINY

__all__ = ["SWITCHES"]

_ROPE = {"rope_type": "default", "rope_theta": 500.0}
_HALF_ROPE = {**_ROPE, "partial_rotary_factor": 0.75}
_RELU2 = {**_TINY, "hidden_act": "relu2"}
_JAIS2 = {**_RELU2, "model_type": "jais2", "layer_norm_eps": 1e-3}
_NEMOTRON = {**_RELU2, "model_type": "nemotron", "norm_eps": 1e-3}
_GPT_NEOX = {
    **_TINY,
    "model_type": "gpt_neox",
    "num_hidden_layers": 3,
    "layer_norm_eps": 1e-3,
    "hidden_act": "gelu",
}
del _GPT_NEOX["num_key_value_heads"]
_HUNYUAN = {**_TINY, "head_dim": 24}
_HUNYUAN_DENSE = {**_HUNYUAN, "model_type": "hunyuan_v1_dense"}
_HUNYUAN_MOE = {**_HUNYUAN, "model_type": "hunyuan_v1_moe", "intermediate_size": 24}
_ALPHA = {"type": "dynamic", "alpha": 50.0, "factor": 1.0}
_APERTUS = {**_TINY, "model_type": "apertus", "hidden_act": "xielu", "head_dim": 24}
_OLMO = {**_TINY, "model_type": "olmo"}
del _OLMO["rms_norm_eps"]
_BITNET = {**_RELU2, "model_type": "bitnet", "rms_norm_eps": 1e-3}
_NANOCHAT = {**_RELU2, "model_type": "nanochat", "rms_norm_eps": 1e-3}
_COHERE2_MOE = {
    **_MOE,
    "model_type": "cohere2_moe",
    "num_hidden_layers": 4,
    "intermediate_size": 24,
    "head_dim": 24,
    "sliding_window": 8,
    "logit_scale": 0.25,
    "layer_norm_eps": 1e-3,
}
_MIMO_V2_FLASH = {
    **_MOE,
    "model_type": "mimo_v2_flash",
    "num_hidden_layers": 7,
    "num_attention_heads": 8,
    "moe_intermediate_size": 20,
    "head_dim": 24,
    "v_head_dim": 12,
}
_AFMOE = {
    **_MOE,
    "model_type": "afmoe",
    "num_hidden_layers": 4,
    "head_dim": 24,
    "moe_intermediate_size": 20,
    "sliding_window": 8,
    "mup_enabled": True,
}

# Keys as in old files and as in new ones, alternating; see `cases.MODELS`.
SWITCHES: dict[str, dict[str, Any]] = {
    "arcee": {**_RELU2, "model_type": "arcee", "rope_theta": 500.0, "intermediate_size": 90},
    "arcee_biases_new_keys": {
        **_RELU2,
        "model_type": "arcee",
        "head_dim": 24,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "rope_parameters": _ROPE,
    },
    "nemotron": {**_NEMOTRON, "rope_theta": 500.0},  # partial_rotary_factor 0.5 by default
    "nemotron_biases_new_keys": {
        **_NEMOTRON,
        "head_dim": 24,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "rope_parameters": _HALF_ROPE,
    },
    "jais2": {**_JAIS2, "rope_theta": 500.0},  # biases by default
    "jais2_no_biases_new_keys": {
        **_JAIS2,
        "head_dim": 24,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "rope_parameters": _ROPE,
    },
    "gpt_neox": {**_GPT_NEOX, "rotary_emb_base": 500, "rotary_pct": 0.5},
    "gpt_neox_sequential_new_keys": {
        **_GPT_NEOX,
        "use_parallel_residual": False,
        "attention_bias": False,
        "rope_parameters": _HALF_ROPE,
    },
    "afmoe": {
        **_AFMOE,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "num_shared_experts": 1,
        "num_dense_layers": 2,
        "route_scale": 1.7,
        "global_attn_every_n_layers": 2,
        "rope_theta": 500.0,
    },
    "afmoe_biases_new_keys": {
        **_AFMOE,
        "num_experts": 5,
        "route_scale": 0.6,
        "mup_enabled": False,
        "attention_bias": True,
        "tie_word_embeddings": True,
        "layer_types": ["full_attention", *["sliding_attention"] * 3],
        "rope_parameters": _ROPE,
    },
    "hunyuan_v1_dense": {**_HUNYUAN_DENSE, "rope_theta": 500.0, "rope_scaling": _ALPHA},
    "hunyuan_v1_dense_biases_new_keys": {
        **_HUNYUAN_DENSE,
        "attention_bias": True,
        "tie_word_embeddings": True,
        "rope_parameters": {**_ROPE, "rope_type": "dynamic", "alpha": 7.0, "factor": 1.0},
    },
    "hunyuan_v1_moe": {
        **_HUNYUAN_MOE,
        "num_hidden_layers": 3,
        "num_experts": 7,
        "moe_topk": [3, 1, 2],
        "rope_theta": 500.0,
        "rope_scaling": _ALPHA,
    },
    "apertus": {
        **_APERTUS,
        "intermediate_size": 90,
        "rope_theta": 500.0,
        "rope_scaling": {
            "type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "apertus_biases_new_keys": {
        **_APERTUS,
        "attention_bias": True,
        "tie_word_embeddings": True,
        "rope_parameters": _ROPE,
    },
    "olmo": {**_OLMO, "rope_theta": 500.0, "clip_qkv": 0.7},
    "olmo_biases_new_keys": {
        **_OLMO,
        "clip_qkv": None,
        "attention_bias": True,
        "tie_word_embeddings": True,
        "rope_parameters": _ROPE,
    },
    "olmoe_clipped": {
        **_MOE,
        "model_type": "olmoe",
        "intermediate_size": 24,
        "num_experts": 5,
        "clip_qkv": 0.9,
        "rope_theta": 500.0,
    },
    "olmoe_clipped_one_head": {  # the limit applies after the norms
        **_MOE,
        "model_type": "olmoe",
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "intermediate_size": 24,
        "num_experts": 5,
        "clip_qkv": 0.9,
        "rope_theta": 500.0,
    },
    "nanochat": {**_NANOCHAT, "rope_theta": 500.0, "final_logit_softcapping": 2.0},
    "nanochat_biases_new_keys": {
        **_NANOCHAT,
        "head_dim": 24,
        "attention_bias": True,
        "tie_word_embeddings": True,
        "final_logit_softcapping": None,
        "rope_parameters": _ROPE,
    },
    "cohere2_moe": {
        **_COHERE2_MOE,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "num_shared_experts": 2,
        "expert_selection_fn": "sigmoid",
        "norm_topk_prob": False,
        "first_k_dense_replace": 1,
        "prefix_dense_intermediate_size": 40,
        "sliding_window_pattern": 2,
        "rms_norm_eps": None,
        "tie_word_embeddings": True,
        "rope_theta": 500.0,
    },
    "cohere2_moe_rms_new_keys": {
        **_COHERE2_MOE,
        "num_experts": 5,
        "num_shared_experts": 1,
        "shared_expert_combination_strategy": "sum",
        "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
        "layer_types": ["full_attention", *["sliding_attention"] * 3],
        "prefix_dense_sliding_window_pattern": 2,
        "attention_bias": True,
        "rms_norm_eps": 2e-3,
        "rope_parameters": _ROPE,
    },
    "mimo_v2_flash": {  # old files have other keys of rope, which hold its defaults
        **_MIMO_V2_FLASH,
        "n_routed_experts": 7,
        "num_experts_per_tok": 3,
        "routed_scaling_factor": None,
        "sliding_window": 7,
        "sliding_window_size": 7,
        "attention_bias": True,
        "layernorm_epsilon": 1e-5,
        "attention_value_scale": 1.3,
    },
    "mimo_v2_flash_new_keys": {
        **_MIMO_V2_FLASH,
        "n_routed_experts": 8,
        "routed_scaling_factor": 1.7,
        "norm_topk_prob": False,
        "n_group": 4,
        "topk_group": 2,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "mlp_layer_types": ["sparse", "dense", "sparse"],
        "num_hidden_layers": 3,
        "rope_parameters": {
            "full_attention": {**_ROPE, "partial_rotary_factor": 0.5},
            "sliding_attention": {
                **_ROPE,
                "rope_theta": 100.0,
                "partial_rotary_factor": 0.75,
            },
        },
    },
    "bitnet": {**_BITNET, "rope_theta": 500.0},
    "bitnet_new_keys_biases": {
        **_BITNET,
        "intermediate_size": 90,
        "attention_bias": True,
        "tie_word_embeddings": True,
        "rope_parameters": _ROPE,
    },
    "hunyuan_v1_moe_new_keys": {
        **_HUNYUAN_MOE,
        "num_experts": 5,
        "moe_topk": 2,
        "tie_word_embeddings": True,
        "rope_parameters": _ROPE,
    },
}
