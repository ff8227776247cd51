"""The tiny golden models: a config.json for every model type and every rope scaling.

Read by `make.py` only; the tests read what it wrote.
"""

from __future__ import annotations

from typing import Any

__all__ = ["MODELS", "ROPES"]

_TINY: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA = {**_TINY, "model_type": "llama"}
_MISTRAL = {**_TINY, "model_type": "mistral"}
_QWEN2 = {**_TINY, "model_type": "qwen2"}
_QWEN3 = {**_TINY, "model_type": "qwen3", "head_dim": 32}
_PHI3 = {**_TINY, "model_type": "phi3"}
_GEMMA3 = {
    **_TINY,
    "model_type": "gemma3_text",
    "head_dim": 32,
    "num_hidden_layers": 3,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 24,
    "sliding_window": 8,
    "tie_word_embeddings": True,
}
del _GEMMA3["hidden_act"]
_GRANITE = {
    **_TINY,
    "model_type": "granite",
    "embedding_multiplier": 3.3,
    "residual_multiplier": 0.3,
    "attention_multiplier": 0.4,
    "logits_scaling": 0.7,
}
_GEMMA2 = {
    **_TINY,  # with a hidden_act, which is ignored
    "model_type": "gemma2",
    "head_dim": 24,
    "num_hidden_layers": 3,
    "query_pre_attn_scalar": 20,
    "sliding_window": 8,
    "tie_word_embeddings": True,
    "rope_theta": 500.0,
}
_SMOLLM3 = {**_TINY, "model_type": "smollm3", "num_hidden_layers": 3}
_GLM4 = {**_TINY, "model_type": "glm4", "head_dim": 24, "rms_norm_eps": 1.5625e-7}
_STARCODER2 = {
    **_TINY,
    "model_type": "starcoder2",
    "intermediate_size": 90,  # padded
    "norm_epsilon": 1e-3,
    "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}
_STABLELM = {**_TINY, "model_type": "stablelm", "layer_norm_eps": 1e-3, "num_attention_heads": 2}
_COHERE2 = {
    **_TINY,
    "model_type": "cohere2",
    "num_hidden_layers": 3,
    "layer_norm_eps": 1e-3,
    "logit_scale": 0.25,
    "sliding_window": 8,
    "tie_word_embeddings": True,
}
_PHI = {
    **_TINY,
    "model_type": "phi",
    "vocab_size": 127,  # no multiple of a vector
    "layer_norm_eps": 1e-3,
    "hidden_act": "gelu_new",
}
_GEMMA4 = {
    **_GEMMA3,
    "model_type": "gemma4_text",
    "num_hidden_layers": 5,
    "head_dim": 24,
    "global_head_dim": 40,
    "layer_types": ["sliding_attention"] + ["sliding_attention", "full_attention"] * 2,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.5,
            "rope_theta": 1000.0,
        },
    },
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": 128,
    "final_logit_softcapping": 3.0,
}
_GEMMA4_31B = {
    **_GEMMA4,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],  # the last is full
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
}
_GEMMA3N = {
    **_GEMMA3,
    "model_type": "gemma3n_text",
    "num_hidden_layers": 5,
    "head_dim": 24,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": 100,
    "laurel_rank": 10,
    "rope_theta": 1000.0,
    "rope_local_base_freq": 300.0,
    "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
    "activation_sparsity_pattern": [0.6, 0.0, 0.7, 0.0, 0.3],
    "final_logit_softcapping": 3.0,
}
for _gemma in (_GEMMA4, _GEMMA4_31B, _GEMMA3N):
    del _gemma["query_pre_attn_scalar"]
_OLMO3 = {**_TINY, "model_type": "olmo3", "num_hidden_layers": 4, "sliding_window": 8}

_MOE = {**_TINY, "num_experts_per_tok": 2}
_QWEN3_MOE = {**_MOE, "model_type": "qwen3_moe", "head_dim": 24, "moe_intermediate_size": 20}
_QWEN2_MOE = {
    **_MOE,
    "model_type": "qwen2_moe",
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
}
_GLM4_MOE = {
    **_MOE,
    "model_type": "glm4_moe",
    "num_hidden_layers": 3,
    "moe_intermediate_size": 20,
    "head_dim": 24,
}
_MIXTRAL = {**_MOE, "model_type": "mixtral", "intermediate_size": 24}
_PHIMOE = {**_MIXTRAL, "model_type": "phimoe", "rms_norm_eps": 1e-3, "router_jitter_noise": 0.2}
_SHORT = [1.0, 1.05, 1.1, 1.2, 1.3, 1.5, 1.8, 2.2]
_OLMOE = {**_MOE, "model_type": "olmoe", "intermediate_size": 24}
_GPT_OSS = {
    **_MOE,
    "model_type": "gpt_oss",
    "num_hidden_layers": 4,
    "intermediate_size": 24,
    "head_dim": 24,
    "sliding_window": 8,
    "swiglu_limit": 0.9,
}
_GRANITEMOE = {**_GRANITE, "model_type": "granitemoe", "intermediate_size": 24}

_YARN = {
    "rope_theta": 10000.0,
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
_YARN_OLD = {key: value for key, value in _YARN.items() if key != "rope_theta"}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_LONGROPE = {
    "type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 1.9, 2.0],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 12.0, 16.0],
}

# Keys as in old files (rope_theta, rope_scaling, torch_dtype) and as in new ones
# (rope_parameters, dtype), alternating.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**_LLAMA, "rope_theta": 500.0, "rope_scaling": None, "torch_dtype": "float32"},
    "llama_tied_new_keys": {
        **_LLAMA,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        "dtype": "float32",
        "eos_token_id": [2, 3],
    },
    "llama_biases_wide_heads": {
        **_LLAMA,
        "attention_bias": True,
        "mlp_bias": True,
        "head_dim": 24,
        "num_key_value_heads": 1,
        "rope_theta": 500.0,
    },
    "llama_linear": {
        **_LLAMA,
        "rope_theta": 500.0,
        "rope_scaling": {"type": "linear", "factor": 4.0},
    },
    "llama_dynamic": {
        **_LLAMA,
        "max_position_embeddings": 16,
        "rope_theta": 500.0,
        "rope_scaling": {"type": "dynamic", "factor": 3.0},
    },
    "llama_yarn": {**_LLAMA, "rope_parameters": _YARN},
    "llama_yarn_not_truncated": {
        **_LLAMA,
        "rope_parameters": {**_YARN, "truncate": False, "beta_fast": 4.0, "beta_slow": 0.5},
    },
    "llama_yarn_mscale": {
        **_LLAMA,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
        },
    },
    "llama_llama3": {**_LLAMA, "rope_theta": 500.0, "rope_scaling": _LLAMA3},
    "mistral": {**_MISTRAL, "rope_theta": 500.0, "sliding_window": None},
    "mistral_window": {
        **_MISTRAL,
        "head_dim": 32,
        "sliding_window": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
    "ministral": {
        **_MISTRAL,
        "model_type": "ministral",
        "num_hidden_layers": 3,
        "head_dim": 24,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
    "qwen2": {**_QWEN2, "rope_theta": 500.0, "tie_word_embeddings": True},
    "qwen2_windows": {
        **_QWEN2,
        "rope_theta": 500.0,
        "num_hidden_layers": 3,
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 1,
    },
    "qwen3": {**_QWEN3, "rope_theta": 500.0},
    "qwen3_biases_new_keys": {
        **_QWEN3,
        "attention_bias": True,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
    "phi3_window": {**_PHI3, "rope_theta": 500.0, "sliding_window": 8},
    "phi3_partial_rotary": {
        **_PHI3,
        "rope_theta": 500.0,
        "partial_rotary_factor": 0.5,
        "tie_word_embeddings": True,
    },
    "phi3_longrope_short": {
        **_PHI3,
        "max_position_embeddings": 128,
        "original_max_position_embeddings": 48,
        "rope_theta": 500.0,
        "rope_scaling": _LONGROPE,
    },
    "phi3_longrope_long": {
        **_PHI3,
        "max_position_embeddings": 128,
        "original_max_position_embeddings": 16,
        "rope_theta": 500.0,
        "rope_scaling": _LONGROPE,
    },
    "phi3_longrope_border": {  # the prompt has 28 tokens: its continuation crosses the border
        **_PHI3,
        "max_position_embeddings": 128,
        "original_max_position_embeddings": 32,
        "rope_theta": 500.0,
        "partial_rotary_factor": 0.75,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0, 1.1, 1.3, 1.5, 1.8, 2.1],
            "long_factor": [1.0, 2.0, 4.0, 7.0, 11.0, 16.0],
        },
    },
    "gemma3": {
        **_GEMMA3,
        "rope_theta": 1000.0,
        "rope_local_base_freq": 100.0,
        "sliding_window_pattern": 2,
    },
    "gemma3_new_keys_softcap": {
        **_GEMMA3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "final_logit_softcapping": 4.0,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
    "olmo2": {**_TINY, "model_type": "olmo2", "rope_theta": 500.0},
    "olmo2_biases_new_keys": {
        **_TINY,
        "model_type": "olmo2",
        "num_key_value_heads": 1,
        "attention_bias": True,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
    # With the old keys, transformers gives layers with windows a theta of 500000 whatever they say.
    "olmo3": {**_OLMO3, "rope_theta": 500000.0, "rope_scaling": _YARN_OLD},
    "olmo3_new_keys": {
        **_OLMO3,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "rope_parameters": {
            "full_attention": {**_YARN, "rope_theta": 1000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
    "gemma4": {
        **_GEMMA4,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gemma4_layer_config_biases": {
        **{key: value for key, value in _GEMMA4.items() if key != "global_head_dim"},
        "per_layer_config": {
            "2": {"head_dim": 40, "num_key_value_heads": 4},
            "4": {"head_dim": 40, "num_key_value_heads": 4},
        },
        "attention_bias": True,
        "use_double_wide_mlp": False,
    },
    "gemma4_keys_as_values": _GEMMA4_31B,
    "gemma4_experts": {
        **_GEMMA4_31B,
        "attention_k_eq_v": False,
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 20,
    },
    "gemma4_silu": {**_GEMMA4, "hidden_activation": "silu"},  # also of the per-layer inputs
    "gemma3n": _GEMMA3N,
    "gemma3n_silu": {**_GEMMA3N, "hidden_activation": "silu"},
    "gemma3n_new_keys_widths": {
        **{key: value for key, value in _GEMMA3N.items() if not key.startswith("rope_")},
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0},
        },
        "intermediate_size": [96, 80, 96, 64, 72],
        "altup_correct_scale": False,
        "attention_bias": True,
    },
    "gemma2": {**_GEMMA2, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma2_new_keys_biases": {
        **_GEMMA2,
        "hidden_activation": "silu",
        "attention_bias": True,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
    "smollm3": {**_SMOLLM3, "rope_theta": 500.0, "no_rope_layer_interval": 2},
    "smollm3_windows_new_keys": {
        **_SMOLLM3,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
        "no_rope_layers": [0, 1, 1],
        "use_sliding_window": True,
        "sliding_window": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
    "glm4": {**_GLM4, "rope_theta": 500.0},  # partial_rotary_factor 0.5 and biases by default
    "glm4_new_keys": {
        **_GLM4,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 500.0,
            "partial_rotary_factor": 0.75,
        },
    },
    "starcoder2": {**_STARCODER2, "rope_theta": 500.0},  # biases and tied by default
    "starcoder2_window_new_keys": {
        **_STARCODER2,
        "hidden_act": "gelu",
        "use_bias": False,
        "sliding_window": 8,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
    "stablelm": {**_STABLELM, "rope_theta": 500.0},  # partial_rotary_factor 0.25 by default
    "stablelm_parallel_new_keys": {
        **_STABLELM,
        "use_qkv_bias": True,
        "use_parallel_residual": True,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 500.0,
            "partial_rotary_factor": 0.75,
        },
    },
    "stablelm_qk_norm": {
        **_STABLELM,
        "num_attention_heads": 4,
        "qk_layernorm": True,
        "use_parallel_residual": True,
        "rope_theta": 500.0,
    },
    "cohere2": {**_COHERE2, "rope_theta": 500.0, "sliding_window_pattern": 2},
    "cohere2_new_keys_biases": {
        **_COHERE2,
        "attention_bias": True,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
    "phi": {**_PHI, "rope_theta": 500.0},  # partial_rotary_factor 0.5 by default
    "phi_qk_norm": {**_PHI, "qk_layernorm": True, "rope_theta": 500.0},
    "phi_new_keys": {
        **_PHI,
        "hidden_act": "gelu",
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 500.0,
            "partial_rotary_factor": 0.75,
        },
    },
    "granite": {**_GRANITE, "rope_theta": 500.0},
    "granite_biases_wide_heads": {
        **_GRANITE,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
        "head_dim": 24,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
}
_NEW_ROPE = {"rope_type": "default", "rope_theta": 500.0}
MODELS |= {
    "qwen3_moe": {
        **_QWEN3_MOE,
        "num_hidden_layers": 4,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
        "rope_theta": 500.0,
    },
    "qwen3_moe_new_keys_window_biases": {
        **_QWEN3_MOE,
        "num_local_experts": 5,
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 8,
        "tie_word_embeddings": True,
        "rope_parameters": _NEW_ROPE,
    },
    "qwen2_moe": {
        **_QWEN2_MOE,
        "num_experts": 9,
        "num_experts_per_tok": 4,
        "mlp_only_layers": [1],
        "num_hidden_layers": 3,
        "rope_theta": 500.0,
    },
    "qwen2_moe_windows": {
        **_QWEN2_MOE,
        "num_hidden_layers": 4,
        "num_experts": 5,
        "norm_topk_prob": True,
        "qkv_bias": False,
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 2,
        "rope_parameters": _NEW_ROPE,
    },
    "glm4_moe": {
        **_GLM4_MOE,
        "n_routed_experts": 9,
        "n_group": 3,
        "topk_group": 2,
        "num_experts_per_tok": 4,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.7,
        "use_qk_norm": True,
        "rope_theta": 500.0,
        "num_nextn_predict_layers": 0,
    },
    "glm4_moe_biases_not_normalized": {
        **_GLM4_MOE,
        "n_routed_experts": 5,
        "n_shared_experts": 1,
        "first_k_dense_replace": 2,
        "norm_topk_prob": False,
        "attention_bias": True,
        "partial_rotary_factor": 0.25,
        "head_dim": 32,
        "rope_parameters": {**_NEW_ROPE, "partial_rotary_factor": 0.25},
    },
    "mixtral": {**_MIXTRAL, "num_local_experts": 5, "rope_theta": 500.0},
    "mixtral_window_one_expert": {
        **_MIXTRAL,
        "num_experts": 3,
        "num_experts_per_tok": 1,
        "head_dim": 24,
        "sliding_window": 8,
        "rope_parameters": _NEW_ROPE,
    },
    "phimoe": {  # transformers reads the short factors only
        **_PHIMOE,
        "num_local_experts": 5,
        "rope_theta": 500.0,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": _SHORT,
            "long_factor": _SHORT,
            "short_mscale": 1.1,
            "long_mscale": 1.3,
            "original_max_position_embeddings": 16,
        },
    },
    "phimoe_window_biases_new_keys": {
        **_PHIMOE,
        "num_local_experts": 7,
        "attention_bias": True,
        "lm_head_bias": True,
        "sliding_window": 8,
        "router_jitter_noise": 0.4,
        "rope_parameters": _NEW_ROPE,
    },
    "olmoe": {**_OLMOE, "num_experts": 7, "num_experts_per_tok": 3, "rope_theta": 500.0},
    "olmoe_normalized_biases": {
        **_OLMOE,
        "num_experts": 5,
        "norm_topk_prob": True,
        "attention_bias": True,
        "num_key_value_heads": 4,
        "rope_parameters": _NEW_ROPE,
    },
    "gpt_oss": {
        **_GPT_OSS,
        "num_local_experts": 7,
        "num_experts_per_tok": 4,
        "swiglu_alpha": 1.3,
        "rope_theta": 500.0,
        "rope_scaling": {**_YARN_OLD, "truncate": False},
    },
    "gpt_oss_layer_types_no_biases": {
        **_GPT_OSS,
        "num_local_experts": 5,
        "attention_bias": False,
        "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
        "rope_parameters": _NEW_ROPE,
    },
    "granitemoe": {
        **_GRANITEMOE,
        "num_local_experts": 5,
        "num_experts_per_tok": 3,
        "rope_theta": 500.0,
    },
    "granitemoe_tied_biases": {
        **_GRANITEMOE,
        "num_local_experts": 3,
        "num_experts_per_tok": 1,
        "attention_bias": True,
        "tie_word_embeddings": True,
        "rope_parameters": _NEW_ROPE,
    },
}

# Families that differ from the ones above in switches only.
_GEMMA = {**_TINY, "model_type": "gemma", "head_dim": 24, "tie_word_embeddings": True}
_VAULTGEMMA = {**_GEMMA2, "model_type": "vaultgemma"}
_GLM = {**_GLM4, "model_type": "glm"}
_SEED_OSS = {**_TINY, "model_type": "seed_oss", "head_dim": 24}
_ERNIE = {**_TINY, "model_type": "ernie4_5", "head_dim": 24, "tie_word_embeddings": True}
_EXAONE4 = {**_TINY, "model_type": "exaone4", "num_hidden_layers": 3, "sliding_window": 8}
_HELIUM = {**_TINY, "model_type": "helium", "head_dim": 16, "rms_norm_eps": 1e-8}
_HYPERCLOVAX = {
    **_GRANITE,
    "model_type": "hyperclovax",
    "logits_scaling": 1.7,
    "use_post_norm": True,
}
_DOTS1 = {**_GLM4_MOE, "model_type": "dots1", "num_hidden_layers": 4, "head_dim": 24}
_SOLAR = {**_GLM4_MOE, "model_type": "solar_open", "num_hidden_layers": 2}
_MINIMAX_M2 = {**_MOE, "model_type": "minimax_m2", "intermediate_size": 24, "head_dim": 24}
_HY_V3 = {**_GLM4_MOE, "model_type": "hy_v3", "router_scaling_factor": 1.7}
_ERNIE_MOE = {
    **_TINY,
    "model_type": "ernie4_5_moe",
    "num_hidden_layers": 5,
    "moe_intermediate_size": 20,
}
_EXAONE_MOE = {**_GLM4_MOE, "model_type": "exaone_moe", "sliding_window": 8}
_MELLUM = {**_QWEN3_MOE, "model_type": "mellum", "num_hidden_layers": 3, "sliding_window": 8}
_FLEX_OLMO = {**_OLMOE, "model_type": "flex_olmo"}
_GRANITEMOESHARED = {**_GRANITEMOE, "model_type": "granitemoeshared"}
MODELS |= {
    "gemma": {**_GEMMA, "hidden_act": "gelu", "rope_theta": 500.0},  # "gelu" means the tanh form
    "gemma_biases_new_keys": {
        **_GEMMA,
        "hidden_act": "silu",
        "attention_bias": True,
        "num_key_value_heads": 1,
        "tie_word_embeddings": False,
        "rope_parameters": _NEW_ROPE,
    },
    "vaultgemma": {**_VAULTGEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "vaultgemma_new_keys_biases": {
        **_VAULTGEMMA,
        "hidden_activation": "silu",
        "attention_bias": True,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "rope_parameters": _NEW_ROPE,
    },
    "glm": {**_GLM, "rope_theta": 500.0},  # partial_rotary_factor 0.5 and biases by default
    "glm_new_keys": {
        **_GLM,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "rope_parameters": {**_NEW_ROPE, "partial_rotary_factor": 0.75},
    },
    "seed_oss": {**_SEED_OSS, "rope_theta": 500.0},  # biases of q, k, v by default
    "seed_oss_new_keys": {
        **_SEED_OSS,
        "attention_bias": False,
        "attention_out_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "rope_parameters": _NEW_ROPE,
    },
    "ernie4_5": {**_ERNIE, "rope_theta": 500.0},
    "ernie4_5_biases_new_keys": {
        **_ERNIE,
        "use_bias": True,
        "tie_word_embeddings": False,
        "rope_parameters": _NEW_ROPE,
    },
    "exaone4": {**_EXAONE4, "rope_theta": 500.0, "sliding_window_pattern": 2},
    "exaone4_layer_types_new_keys": {
        **_EXAONE4,
        "tie_word_embeddings": True,
        "sliding_window_pattern": "GLL",
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "rope_parameters": {"rope_theta": 500.0, **_LLAMA3},
    },
    "exaone4_no_windows": {
        **_EXAONE4,
        "sliding_window": None,
        "layer_types": ["full_attention"] * 3,
        "rope_theta": 500.0,
        "rope_scaling": _LLAMA3,
    },
    "helium": {**_HELIUM, "rope_theta": 500.0},
    "helium_biases_new_keys": {
        **_HELIUM,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "rope_parameters": _NEW_ROPE,
    },
    "hyperclovax": {**_HYPERCLOVAX, "rope_theta": 500.0},
    "hyperclovax_biases_new_keys": {
        **_HYPERCLOVAX,
        "use_post_norm": False,
        "attention_multiplier": None,
        "head_dim": 24,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "rope_parameters": _NEW_ROPE,
    },
    "dots1": {
        **_DOTS1,
        "n_routed_experts": 9,
        "n_group": 3,
        "topk_group": 2,
        "num_experts_per_tok": 4,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.7,
        "sliding_window": 8,
        "max_window_layers": 2,
        "rope_theta": 500.0,
    },
    "dots1_biases_new_keys": {
        **_DOTS1,
        "n_routed_experts": 5,
        "n_shared_experts": 1,
        "attention_bias": True,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": _NEW_ROPE,
    },
    "solar_open": {
        **_SOLAR,
        "n_routed_experts": 9,
        "n_group": 3,
        "topk_group": 2,
        "num_experts_per_tok": 4,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.7,
        "rope_theta": 500.0,
        "rope_scaling": _YARN_OLD,
    },
    "solar_open_biases_not_normalized": {
        **_SOLAR,
        "n_routed_experts": 5,
        "norm_topk_prob": False,
        "attention_bias": True,
        "tie_word_embeddings": True,
        "rope_parameters": _NEW_ROPE,
    },
    "minimax_m2": {
        **_MINIMAX_M2,
        "num_local_experts": 7,
        "num_experts_per_tok": 3,
        "rotary_dim": 12,
        "rope_theta": 500.0,
    },
    "minimax_m2_new_keys": {
        **_MINIMAX_M2,
        "num_experts": 5,
        "tie_word_embeddings": True,
        "rope_parameters": {**_NEW_ROPE, "partial_rotary_factor": 0.75},
    },
    "hy_v3": {**_HY_V3, "num_experts": 7, "num_shared_experts": 2, "rope_theta": 500.0},
    "hy_v3_biases_new_keys": {
        **_HY_V3,
        "num_local_experts": 5,
        "num_experts_per_tok": 3,
        "mlp_layer_types": ["sparse", "dense", "sparse"],
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "rope_parameters": _NEW_ROPE,
    },
    "ernie4_5_moe": {
        **_ERNIE_MOE,
        "moe_num_experts": 7,
        "moe_k": 3,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 3,
        "moe_layer_interval": 2,
        "tie_word_embeddings": True,
        "rope_theta": 500.0,
    },
    "ernie4_5_moe_biases_new_keys": {
        **_ERNIE_MOE,
        "num_hidden_layers": 3,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_num_shared_experts": 1,
        "use_bias": True,
        "rope_parameters": _NEW_ROPE,
    },
    "exaone_moe": {
        **_EXAONE_MOE,
        "num_experts": 9,
        "n_group": 3,
        "topk_group": 2,
        "num_experts_per_tok": 4,
        "num_shared_experts": 2,
        "routed_scaling_factor": 1.7,
        "sliding_window_pattern": 2,
        "rope_theta": 500.0,
    },
    "exaone_moe_layer_types_not_normalized": {
        **_EXAONE_MOE,
        "num_experts": 5,
        "norm_topk_prob": False,
        "mlp_layer_types": ["sparse", "dense", "sparse"],
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "tie_word_embeddings": True,
        "rope_parameters": _NEW_ROPE,
    },
    "mellum": {
        **_MELLUM,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "mlp_layer_types": ["sparse", "dense", "sparse"],
        "rope_parameters": {
            "full_attention": {**_YARN, "rope_theta": 1000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
    "mellum_biases_not_normalized": {
        **_MELLUM,
        "num_local_experts": 5,
        "norm_topk_prob": False,
        "attention_bias": True,
        "tie_word_embeddings": True,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "flex_olmo": {**_FLEX_OLMO, "num_experts": 7, "num_experts_per_tok": 3, "rope_theta": 500.0},
    "flex_olmo_normalized_biases": {
        **_FLEX_OLMO,
        "num_experts": 5,
        "norm_topk_prob": True,
        "attention_bias": True,
        "num_key_value_heads": 1,
        "rope_parameters": _NEW_ROPE,
    },
    "granitemoeshared": {
        **_GRANITEMOESHARED,
        "num_local_experts": 5,
        "num_experts_per_tok": 3,
        "shared_intermediate_size": 28,
        "rope_theta": 500.0,
    },
    "granitemoeshared_tied_biases_none_shared": {
        **_GRANITEMOESHARED,
        "num_local_experts": 3,
        "attention_bias": True,
        "tie_word_embeddings": True,
        "rope_parameters": _NEW_ROPE,
    },
}

_GRANITE_SWA = {
    **_GRANITE,
    "model_type": "granite_swa",
    "num_hidden_layers": 5,
    "sliding_window": 8,
}
MODELS |= {
    "granite_swa": {**_GRANITE_SWA, "rope_theta": 500.0, "tie_word_embeddings": True},
    "granite_swa_thetas_new_keys_biases": {
        **_GRANITE_SWA,
        "layer_types": [f"{kind}_attention" for kind in ("sliding", "full", "full", "sliding")],
        "num_hidden_layers": 4,
        "layer_rope_theta": [70.0, 0, 500.0, 70.0],
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": _NEW_ROPE,
    },
    "granitemoe_swa": {
        **_GRANITEMOESHARED,
        "model_type": "granitemoe_swa",
        "num_local_experts": 5,
        "num_experts_per_tok": 3,
        "shared_intermediate_size": 28,
        "sliding_window": 8,
        "layer_rope_theta": [0, 500.0],
    },
}

_PERSIMMON = {
    **_TINY,
    "model_type": "persimmon",
    "num_key_value_heads": 4,
    "layer_norm_eps": 1e-3,
    "hidden_act": "relu2",
}
_FALCON = {
    **{
        key: value
        for key, value in _TINY.items()
        if not key.startswith(("intermediate", "num_k", "hidden_a"))
    },
    "model_type": "falcon",
    "layer_norm_epsilon": 1e-3,
}
MODELS |= {
    "persimmon": {**_PERSIMMON, "rope_theta": 500.0},
    "persimmon_plain_new_keys": {
        **_PERSIMMON,
        "hidden_act": "gelu",
        "qk_layernorm": False,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 500.0,
            "partial_rotary_factor": 0.75,
        },
    },
    "falcon": {**_FALCON, "num_kv_heads": 4, "rope_theta": 500.0},
    "falcon_grouped_new_keys_biases": {
        **_FALCON,
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
        "ffn_hidden_size": 96,
        "activation": "gelu",
        "bias": True,
        "tie_word_embeddings": True,
        "rope_parameters": _NEW_ROPE,
    },
    "falcon_grouped_one_norm": {
        **_FALCON,
        "new_decoder_architecture": True,
        "num_ln_in_parallel_attn": 1,
        "num_kv_heads": 2,
    },
    "falcon_sequential": {**_FALCON, "multi_query": False, "parallel_attn": False},
}

# GPT-2's own names of keys, and learned positions.
_GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 128,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "layer_norm_epsilon": 1e-3,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_BIGCODE = {**_GPT2, "model_type": "gpt_bigcode"}
_OPT = {
    "model_type": "opt",
    "vocab_size": 128,
    "hidden_size": 64,
    "word_embed_proj_dim": 64,
    "ffn_dim": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GPT_NEO = {
    "model_type": "gpt_neo",
    "vocab_size": 128,
    "hidden_size": 64,
    "num_layers": 4,
    "num_heads": 4,
    "attention_types": [[["global", "local"], 1], [["local", "global"], 1]],
    "window_size": 6,
    "max_position_embeddings": 64,
    "layer_norm_epsilon": 1e-3,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS |= {
    "gpt2": _GPT2,
    "gpt2_scales_by_layer": {
        **_GPT2,
        "n_layer": 3,
        "n_inner": 96,
        "activation_function": "gelu",
        "scale_attn_by_inverse_layer_idx": True,
        "tie_word_embeddings": False,
    },
    "gpt2_unscaled": {**_GPT2, "scale_attn_weights": False, "activation_function": "relu"},
    "gpt_bigcode": _BIGCODE,
    "gpt_bigcode_heads_unscaled": {
        **_BIGCODE,
        "multi_query": False,
        "scale_attn_weights": False,
        "n_inner": 96,
        "tie_word_embeddings": False,
    },
    "opt": _OPT,
    "opt_no_biases": {
        **_OPT,
        "enable_bias": False,
        "activation_function": "gelu",
        "tie_word_embeddings": False,
    },
    "gpt_neo": _GPT_NEO,
}

# The factor on queries: 1 for the first 8 positions, then it grows twice before the prompt ends.
_MINISTRAL3 = {**_TINY, "model_type": "ministral3", "head_dim": 24}
_Q_SCALE = {**_YARN_OLD, "original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.7}
MODELS |= {
    "ministral3": {**_MINISTRAL3, "rope_theta": 500.0, "rope_scaling": _Q_SCALE},
    "ministral3_window_new_keys": {
        **_MINISTRAL3,
        "sliding_window": 12,
        "tie_word_embeddings": True,
        "rope_parameters": {
            **_Q_SCALE,
            "rope_theta": 500.0,
            "original_max_position_embeddings": 11,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
        },
    },
}

# Families that are others' layers under names of their own
_EXAONE = {**_TINY, "model_type": "exaone"}
for _key, _own in (
    ("num_hidden_layers", "num_layers"),
    ("rms_norm_eps", "layer_norm_epsilon"),
    ("hidden_act", "activation_function"),
):
    _EXAONE[_own] = _EXAONE.pop(_key)
_COHERE = {**_COHERE2, "model_type": "cohere", "num_hidden_layers": 2}
del _COHERE["sliding_window"]
_SARVAM_MOE = {
    **_GLM4_MOE,
    "model_type": "sarvam_moe",
    "num_hidden_layers": 2,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_SARVAM_MLA = {
    **{key: value for key, value in _SARVAM_MOE.items() if key != "head_dim"},
    "model_type": "sarvam_mla",
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
MODELS |= {
    "exaone": {**_EXAONE, "head_dim": 24, "rope_theta": 500.0, "rope_scaling": _LLAMA3},
    "exaone_biases_new_keys": {
        **_EXAONE,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "rope_parameters": _NEW_ROPE,
    },
    "internlm3": {
        **_TINY,
        "model_type": "internlm3",
        "head_dim": 24,
        "qkv_bias": True,
        "bias": True,
        "rope_theta": 500.0,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    },
    "iquestcoder": {**_TINY, "model_type": "iquestcoder", "head_dim": 24, "rope_theta": 500.0},
    "cohere": {**_COHERE, "rope_theta": 500.0},
    "cohere_qk_norm": {**_COHERE, "use_qk_norm": True, "rope_theta": 500.0},
    "cohere_biases_new_keys": {
        **_COHERE,
        "attention_bias": True,
        "tie_word_embeddings": False,
        "rope_parameters": _NEW_ROPE,
    },
    "sarvam_moe": {**_SARVAM_MOE, "routed_scaling_factor": 1.7, "rope_theta": 500.0},
    "sarvam_moe_biases_new_keys": {
        **_SARVAM_MOE,
        "use_qkv_bias": True,
        "use_qk_norm": False,
        "num_shared_experts": 2,
        "tie_word_embeddings": True,
        "rope_parameters": _NEW_ROPE,
    },
    "sarvam_mla": {
        **_SARVAM_MLA,
        "head_dim": 28,  # the width of a cached token, which is not read
        "q_head_dim": 24,
        "rope_theta": 500.0,
        "rope_scaling": {
            **{key: value for key, value in _YARN_OLD.items() if key != "rope_type"},
            "type": "deepseek_yarn",
            "mscale": 1.0,
            "mscale_all_dim": 0.8,
        },
    },
}

_HEAD128 = {**_LLAMA, "hidden_size": 512, "max_position_embeddings": 131072}

# (config, length of the sequence) of rope tables with the numbers of real models.
ROPES: dict[str, tuple[dict[str, Any], int]] = {
    "llama3.1": (
        {
            **_HEAD128,
            "rope_theta": 500000.0,
            "rope_scaling": {**_LLAMA3, "original_max_position_embeddings": 8192},
        },
        100,
    ),
    "linear": ({**_HEAD128, "rope_scaling": {"rope_type": "linear", "factor": 2.5}}, 100),
    "yarn_qwen": (
        {
            **_HEAD128,
            "rope_theta": 1000000.0,
            "rope_scaling": {**_YARN, "original_max_position_embeddings": 32768},
        },
        100,
    ),
    "yarn_not_truncated": (
        {
            **_HEAD128,
            "rope_theta": 150000.0,
            "rope_scaling": {
                **_YARN,
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "truncate": False,
            },
        },
        100,
    ),
    "yarn_attention_factor": (
        {
            **_HEAD128,
            "rope_scaling": {
                **_YARN,
                "original_max_position_embeddings": 4096,
                "attention_factor": 1.25,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
            },
        },
        100,
    ),
    **{
        f"dynamic_{length}": (
            {
                **_HEAD128,
                "max_position_embeddings": 2048,
                "rope_scaling": {"type": "dynamic", "factor": 2.0},
            },
            length,
        )
        for length in (100, 2048, 2049, 4000)
    },
    **{
        f"longrope_{length}": (
            {
                **_PHI3,
                "max_position_embeddings": 131072,
                "original_max_position_embeddings": 4096,
                "rope_scaling": _LONGROPE,
            },
            length,
        )
        for length in (4096, 4097)
    },
}
