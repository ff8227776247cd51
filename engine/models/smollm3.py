"""SmolLM3: Llama with some layers without rope."""

from __future__ import annotations

from engine.models.family import Family
from engine.models.llama import LLAMA_NAMES

__all__ = ["SMOLLM3"]

SMOLLM3 = Family(
    model_type="smollm3",
    names=LLAMA_NAMES,
    gguf_arch="smollm3",
    gguf_interleaved_rope=True,
    defaults={
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 2e6,
        "no_rope_layer_interval": 4,
        "tie_word_embeddings": True,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "pad_token_id": 128004,
    },
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    mlp_bias="mlp_bias",
    windows="layers_without_rope",
    rope_layers="no_rope_layers",
)
