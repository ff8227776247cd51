"""OLMo 2 and 3: post-norms only, QK-norm over all heads of q or k together; windows in OLMo 3."""

from __future__ import annotations

from dataclasses import replace

from engine.models.family import HF_LAYER_NAMES, HF_NAMES, Family, TensorName

__all__ = ["OLMO2", "OLMO3"]

OLMO2 = Family(
    model_type="olmo2",
    names=(
        *HF_NAMES,
        *HF_LAYER_NAMES,
        TensorName("model.layers.{i}.post_attention_layernorm.weight", "post_attn_norm"),
        TensorName("model.layers.{i}.post_feedforward_layernorm.weight", "post_mlp_norm"),
    ),
    gguf_arch="olmo2",
    defaults={
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 50279,
        "pad_token_id": 1,
    },
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm=True,
    whole_qk_norm=True,
    pre_norms=False,
    post_norms=True,
)

OLMO3 = replace(
    OLMO2,
    model_type="olmo3",
    gguf_arch="",  # its .gguf files declare "olmo2"
    defaults={
        **OLMO2.defaults,
        "rope_theta": 5e5,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
    windows="pattern",
    local_rope=True,  # rope scaling applies to full-attention layers only
)
