"""The tiny golden models of multimodal types: a config.json with a text model and a small tower.

Read by `make.py` only, as `cases.py` is.
"""

from __future__ import annotations

from typing import Any

from cases import MODELS as _PLAIN

__all__ = ["WRAPPED"]

_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "hidden_act"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)
_TEXT: dict[str, Any] = {key: _PLAIN["llama"][key] for key in _SIZES}
_GEMMA3 = {**_TEXT, "head_dim": 24, "query_pre_attn_scalar": 20, "num_hidden_layers": 3}
_GEMMA3 |= {"sliding_window": 8, "hidden_activation": "gelu_pytorch_tanh"}
del _GEMMA3["hidden_act"]
_QWEN3 = {**_TEXT, "head_dim": 24}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 20, "tie_word_embeddings": False}
# The sections of height and width begin at other frequencies in every type.
_MROPE = {"type": "mrope", "mrope_section": [2, 3, 3]}
_INTERLEAVED = {"mrope_section": [4, 4, 4], "mrope_interleaved": True, "rope_type": "default"}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 16}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}

_LLAMA4 = {
    **_TEXT,
    "head_dim": 24,
    "intermediate_size": 40,
    "intermediate_size_mlp": 88,
    "num_hidden_layers": 4,
    "num_local_experts": 5,
    "attention_chunk_size": 6,
    "floor_scale": 4,
    "attn_scale": 0.7,
}

_LATENT = {
    **_TEXT,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
    "n_group": 4,
    "topk_group": 2,
}

_TOWER = {"hidden_size": 8, "intermediate_size": 8}
_SIGLIP = {**_TOWER, "num_hidden_layers": 1, "num_attention_heads": 2}
_SIGLIP |= {"model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14}
_KIMI_TOWER = {**_TOWER, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4}
_PIXTRAL = {**_SIGLIP, "model_type": "pixtral", "head_dim": 4}
_LLAMA4_TOWER = {**_SIGLIP, "model_type": "llama4_vision_model", "vision_output_dim": 8}
_LLAMA4_TOWER |= {"projector_input_dim": 8, "projector_output_dim": 8}
_GEMMA4_TOWER = {**_TOWER, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 4}
_GEMMA4_TOWER |= {"num_key_value_heads": 2, "position_embedding_size": 16}
_QWEN_TOWER = {**_TOWER, "depth": 1, "num_heads": 2, "out_hidden_size": 64, "patch_size": 4}
_QWEN3_TOWER = {**_QWEN_TOWER, "num_position_embeddings": 4, "deepstack_visual_indexes": [0]}
_QWEN2_5_TOWER = {**_QWEN_TOWER, "fullatt_block_indexes": [0]}
_QWEN2_TOWER = {"depth": 1, "embed_dim": 8, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 1}
_QWEN2_TOWER |= {"patch_size": 4}

_PHI4 = {
    **_TEXT,
    "model_type": "phi4_multimodal",
    "vision_config": {**_SIGLIP, "num_hidden_layers": 2, "crop_size": 28},
    "audio_config": {
        **_TOWER,
        "num_blocks": 1,
        "num_attention_heads": 2,
        "ext_pw_out_channel": 8,
        "depthwise_separable_out_channel": 8,
        "nemo_conv_channels": 8,
        "input_size": 16,
    },
}
del _PHI4["vision_config"]["model_type"]

# Keys of old and of new files alternate, as in `cases.py`.
WRAPPED: dict[str, dict[str, Any]] = {
    "phi4_multimodal": {
        **_PHI4,
        "tie_word_embeddings": True,
        "rope_theta": 500.0,
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 16,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0, 1.2, 1.4, 1.6, 1.8, 2.0],
            "long_factor": [2.0, 2.5, 3.0, 3.5, 4.0, 4.5],
        },
    },
    "phi4_multimodal_window_new_keys": {
        **_PHI4,
        "sliding_window": 8,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 500.0,
            "partial_rotary_factor": 0.5,
        },
    },
    "mistral3_tied": {  # as transformers does if no key says it
        "model_type": "mistral3",
        "torch_dtype": "float32",
        "vision_config": _PIXTRAL,
        "text_config": {
            **_TEXT,
            "model_type": "mistral",
            "head_dim": 24,
            "rope_theta": 500.0,
            "sliding_window": 8,
        },
    },
    "mistral3_new_keys": {
        "model_type": "mistral3",
        "dtype": "float32",
        "tie_word_embeddings": False,
        "vision_config": _PIXTRAL,
        "text_config": {
            **_TEXT,
            "model_type": "mistral",
            "sliding_window": None,
            "rope_parameters": {**_YARN, "rope_theta": 500.0},
        },
    },
    "mistral3_of_ministral3": {
        "model_type": "mistral3",
        "tie_word_embeddings": False,
        "vision_config": _PIXTRAL,
        "text_config": {
            **_TEXT,
            "model_type": "ministral3",
            "rope_parameters": {**_YARN, "rope_theta": 500.0, "llama_4_scaling_beta": 0.6},
        },
    },
    "mistral3_of_mistral4": {
        "model_type": "mistral3",
        "tie_word_embeddings": False,
        "vision_config": _PIXTRAL,
        "text_config": {
            **_LATENT,
            "model_type": "mistral4",
            "rope_parameters": {**_YARN, "rope_theta": 500.0, "llama_4_scaling_beta": 0.6},
        },
    },
    "kimi_k25": {  # as transformers does, the output layer is not the embedding whatever is said
        "model_type": "kimi_k25",
        "tie_word_embeddings": False,
        "vision_config": _KIMI_TOWER,
        "text_config": {
            **_LATENT,
            "model_type": "kimi_k2",
            "rope_theta": 500.0,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
        },
    },
    "kimi_k25_new_keys": {
        "model_type": "kimi_k25",
        "tie_word_embeddings": False,
        "vision_config": _KIMI_TOWER,
        "text_config": {
            **_LATENT,
            "model_type": "deepseek_v3",
            "norm_topk_prob": False,
            "rope_parameters": {**_YARN, "rope_theta": 500.0},
        },
    },
    "gemma3_wrapped": {
        "model_type": "gemma3",
        "eos_token_id": [2, 5],
        "vision_config": _SIGLIP,
        "text_config": {  # the model_type is not said
            **_GEMMA3,
            "rope_theta": 1000.0,
            "rope_local_base_freq": 100.0,
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
            "sliding_window_pattern": 2,
        },
    },
    "gemma3_wrapped_new_keys": {
        "model_type": "gemma3",
        "vision_config": _SIGLIP,
        "text_config": {
            **_GEMMA3,
            "model_type": "gemma3_text",
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    },
    "gemma3_wrapped_softcap": {  # which the text model alone applies
        "model_type": "gemma3",
        "vision_config": _SIGLIP,
        "text_config": {
            **_GEMMA3,
            "model_type": "gemma3_text",
            "final_logit_softcapping": 1.0,
            "rope_theta": 1000.0,
            "sliding_window_pattern": 2,
        },
    },
    "gemma4_unified": {
        "model_type": "gemma4_unified",
        "audio_config": None,
        "vision_config": {
            "patch_size": 4,
            "pooling_kernel_size": 1,
            "mm_embed_dim": 8,
            "mm_posemb_size": 8,
            "output_proj_dims": 64,
        },
        "text_config": {
            **{
                key: value
                for key, value in _PLAIN["gemma4_keys_as_values"].items()
                if "_per_layer_" not in key
            },
            "model_type": "gemma4_unified_text",
        },
    },
    "gemma4_wrapped": {
        "model_type": "gemma4",
        "audio_config": None,
        "vision_config": _GEMMA4_TOWER,
        "text_config": {**_PLAIN["gemma4_keys_as_values"], "hidden_size_per_layer_input": 12},
    },
    "llama4": {
        "model_type": "llama4",
        "vision_config": _LLAMA4_TOWER,
        "text_config": {
            **_LLAMA4,
            "model_type": "llama4_text",
            "no_rope_layers": [],
            "no_rope_layer_interval": 3,
            "interleave_moe_layer_step": 2,
            "attn_temperature_tuning": False,
            "rope_theta": 500.0,
            # Bounds as published: nothing is interpolated
            "rope_scaling": {**_LLAMA3, "low_freq_factor": 1.0, "high_freq_factor": 1.0},
        },
    },
    "llama4_biases_new_keys": {
        "model_type": "llama4",
        "tie_word_embeddings": False,
        "vision_config": _LLAMA4_TOWER,
        "text_config": {
            **_LLAMA4,
            "model_type": "llama4_text",
            "attention_bias": True,
            "no_rope_layers": [1, 0, 0, 1],
            "layer_types": ["chunked_attention", "full_attention"] * 2,
            "moe_layers": [0, 3],
            "use_qk_norm": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    },
    "llama4_yarn": {  # the norms after rope undo YaRN's factor on cos and sin
        "model_type": "llama4",
        "vision_config": _LLAMA4_TOWER,
        "text_config": {
            **_LLAMA4,
            "model_type": "llama4_text",
            "rms_norm_eps": 1e-2,
            "no_rope_layers": [1, 0, 1, 1],
            "interleave_moe_layer_step": 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 500.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "attention_factor": 1.4,
            },
        },
    },
    "qwen2_vl": {  # the text model's keys are among those of the whole model
        **_TEXT,
        "model_type": "qwen2_vl",
        "tie_word_embeddings": False,
        "rope_theta": 500.0,
        "rope_scaling": _MROPE,
        "vision_config": _QWEN2_TOWER,
    },
    "qwen2_vl_new_keys": {
        "model_type": "qwen2_vl",
        "tie_word_embeddings": True,
        "vision_config": _QWEN2_TOWER,
        "text_config": {
            **_TEXT,
            "model_type": "qwen2_vl_text",
            "rope_parameters": {**_MROPE, "rope_theta": 500.0},
        },
    },
    "qwen2_5_vl": {
        **_TEXT,
        "model_type": "qwen2_5_vl",
        "tie_word_embeddings": False,
        "rope_theta": 500.0,
        "rope_scaling": _MROPE,
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 1,
        "vision_config": _QWEN2_5_TOWER,
    },
    "qwen2_5_vl_tied_new_keys": {
        "model_type": "qwen2_5_vl",
        "vision_config": _QWEN2_5_TOWER,
        "text_config": {
            **_TEXT,
            "model_type": "qwen2_5_vl_text",
            "tie_word_embeddings": True,  # releases before 5 say it here
            "rope_parameters": {**_YARN, "rope_theta": 500.0, "mrope_section": [3, 3, 2]},
        },
    },
    "qwen3_vl": {
        "model_type": "qwen3_vl",
        "tie_word_embeddings": False,
        "vision_config": _QWEN3_TOWER,
        "text_config": {**_QWEN3, "rope_theta": 700.0, "rope_scaling": _INTERLEAVED},
    },
    "qwen3_vl_tied_biases_new_keys": {
        "model_type": "qwen3_vl",
        "tie_word_embeddings": True,
        "vision_config": _QWEN3_TOWER,
        "text_config": {
            **_QWEN3,
            "model_type": "qwen3_vl_text",
            "attention_bias": True,
            "rope_parameters": {**_INTERLEAVED, "rope_theta": 500.0},
        },
    },
    "qwen3_vl_moe": {
        "model_type": "qwen3_vl_moe",
        "vision_config": _QWEN3_TOWER,
        "text_config": {
            **_QWEN3,
            **_EXPERTS,
            "num_experts": 5,
            "num_hidden_layers": 3,
            "decoder_sparse_step": 2,
            "rope_theta": 700.0,
            "rope_scaling": _INTERLEAVED,
        },
    },
    "qwen3_vl_moe_new_keys": {
        "model_type": "qwen3_vl_moe",
        "vision_config": _QWEN3_TOWER,
        "text_config": {
            **_QWEN3,
            **_EXPERTS,
            "model_type": "qwen3_vl_moe_text",
            "num_local_experts": 6,
            "mlp_only_layers": [0],
            "moe_intermediate_size": 32,  # with 2 * 32 = 64, gate and up are square
            "rope_parameters": {**_INTERLEAVED, "rope_theta": 500.0},
        },
    },
}
"""Cases by name."""
