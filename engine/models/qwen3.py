"""Qwen3 (dense): per-head QK-norm, and head_dim independent of hidden_size."""

from __future__ import annotations

from engine.models.family import Family
from engine.models.llama import LLAMA_NAMES

__all__ = ["QWEN3"]

QWEN3 = Family(
    model_type="qwen3",
    names=LLAMA_NAMES,
    gguf_arch="qwen3",
    defaults={
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm=True,
    windows="max_window_layers",
)
