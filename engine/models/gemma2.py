"""Gemma 2: pre- and post-norms with weight 1 + w, soft caps, a window in every second layer."""

from __future__ import annotations

from dataclasses import replace

from engine.models.family import Family
from engine.models.gemma3 import GEMMA3

__all__ = ["GEMMA2", "VAULTGEMMA"]

GEMMA2 = Family(
    model_type="gemma2",
    names=GEMMA3.names,
    gguf_arch="gemma2",
    defaults={
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
    },
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    post_norms=True,
    windows="pattern",
    norm_weight_offset=1.0,
    scale_embedding=True,
)

VAULTGEMMA = replace(GEMMA2, model_type="vaultgemma", gguf_names=(), gguf_arch="", post_norms=False)
"""The same without post-norms. No .gguf."""
