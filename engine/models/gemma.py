"""Gemma (1): Llama with norms of weight 1 + w, GeGLU and scaled embeddings."""

from __future__ import annotations

from engine.models.family import Family
from engine.models.llama import LLAMA_NAMES

__all__ = ["GEMMA"]

GEMMA = Family(
    model_type="gemma",
    names=LLAMA_NAMES,
    gguf_arch="gemma",
    defaults={
        "num_key_value_heads": 16,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
    },
    # The first releases say "gelu", but were trained with the approximation.
    activation_aliases={"gelu": "gelu_pytorch_tanh"},
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    norm_weight_offset=1.0,
    scale_embedding=True,
)
