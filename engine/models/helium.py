"""Helium: Llama with interleaved rope."""

from __future__ import annotations

from engine.models.family import Family
from engine.models.llama import LLAMA_NAMES

__all__ = ["HELIUM"]

HELIUM = Family(
    model_type="helium",
    names=LLAMA_NAMES,
    gguf_names=(),
    defaults={
        "num_key_value_heads": 20,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-8,
        "rope_theta": 1e5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 3,
    },
    qkv_bias="attention_bias",
    mlp_bias="mlp_bias",
    interleaved_rope=True,
)
