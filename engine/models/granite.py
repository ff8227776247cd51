"""Granite (dense): Llama with factors on embeddings, branches, attention scores and logits."""

from __future__ import annotations

from dataclasses import replace

from engine.models.family import Family, TensorName
from engine.models.llama import LLAMA_NAMES

__all__ = ["GRANITE", "GRANITE_SWA", "SINKS", "WINDOWS"]

SINKS = TensorName("model.layers.{i}.self_attn.sinks", "sinks")
WINDOWS = {"sliding_window": 128, "sliding_window_pattern": 4}
"""The window of Granite SWA, in all layers but the first of every four."""

GRANITE = Family(
    model_type="granite",
    names=LLAMA_NAMES,
    gguf_arch="granite",
    gguf_interleaved_rope=True,
    defaults={
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attention_multiplier": 1.0,
    },
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    mlp_bias="mlp_bias",
    multipliers=True,
)

GRANITE_SWA = replace(
    GRANITE,
    model_type="granite_swa",
    names=(*GRANITE.names, SINKS),
    gguf_names=(),
    gguf_arch="",
    gguf_interleaved_rope=False,
    defaults={
        **GRANITE.defaults,
        **WINDOWS,
        "num_key_value_heads": 4,
        "intermediate_size": 8192,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": 100257,
        "eos_token_id": 100257,
    },
    sinks=True,
    windows="pattern_from_first",
    rope_layers="layer_rope_theta",
)
"""The same with windows in most layers, attention sinks, and a base of rope per layer."""
