"""Command R and A, Aya: parallel blocks, a LayerNorm without bias, a factor on the logits."""

from __future__ import annotations

from dataclasses import replace

from engine.models.family import HF_LAYER_NAMES, HF_NAMES, Family, own_norm_names

__all__ = ["COHERE", "COHERE2"]

COHERE2 = Family(
    model_type="cohere2",
    names=(*HF_NAMES, *HF_LAYER_NAMES),
    gguf_arch="cohere2",
    defaults={
        "max_position_embeddings": 8192,
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.0625,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "tie_word_embeddings": True,
    },
    eps_key="layer_norm_eps",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    layer_norm=True,
    parallel=True,
    windows="pattern",
    rope_layers="windows",
    logit_scale="logit_scale",
    interleaved_rope=True,
    gguf_interleaved_rope=True,
)

COHERE = replace(
    COHERE2,
    model_type="cohere",
    names=own_norm_names(COHERE2.names),
    gguf_names=(),
    gguf_arch="",
    gguf_interleaved_rope=False,
    defaults={
        "max_position_embeddings": 8192,
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.0625,
        "rope_theta": 5e5,
        "tie_word_embeddings": True,
        "bos_token_id": 5,
        "eos_token_id": 255001,
        "pad_token_id": 0,
    },
    qk_norm="use_qk_norm",
    own_qk_norms=True,
    windows="never",
    rope_layers="all",
)
"""The same with full attention and rope in all layers; norms of heads in Command R+."""
