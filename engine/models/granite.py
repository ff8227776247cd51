"""Granite (dense): Llama with factors on embeddings, branches, attention scores and logits."""

from __future__ import annotations

from engine.models.family import Family
from engine.models.llama import LLAMA_NAMES

__all__ = ["GRANITE"]

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
