"""Command R7B and A: parallel blocks, a LayerNorm without bias, rope only in windowed layers."""

from __future__ import annotations

from engine.models.family import HF_LAYER_NAMES, HF_NAMES, Family

__all__ = ["COHERE2"]

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
