"""Gemma 3, text only: pre- and post-norms with weight 1 + w, two ropes, mostly windowed layers."""

from __future__ import annotations

from engine.models.family import HF_LAYER_NAMES, HF_NAMES, Family, TensorName

__all__ = ["GEMMA3"]

GEMMA3 = Family(
    model_type="gemma3_text",
    names=(
        *HF_NAMES,
        *HF_LAYER_NAMES,
        TensorName("model.layers.{i}.post_attention_layernorm.weight", "post_attn_norm"),
        TensorName("model.layers.{i}.pre_feedforward_layernorm.weight", "mlp_norm"),
        TensorName("model.layers.{i}.post_feedforward_layernorm.weight", "post_mlp_norm"),
    ),
    gguf_arch="gemma3",
    defaults={
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "query_pre_attn_scalar": 256,
        "final_logit_softcapping": None,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
    },
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm=True,
    post_norms=True,
    windows="pattern",
    norm_weight_offset=1.0,
    scale_embedding=True,
    local_rope=True,
    max_position_is_scaled=True,
)
