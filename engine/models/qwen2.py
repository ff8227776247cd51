"""Qwen2 and Qwen2.5: llama with a bias on q, k and v."""

from __future__ import annotations

from engine.models.family import Family
from engine.models.llama import LLAMA_NAMES

__all__ = ["QWEN2"]

QWEN2 = Family(
    model_type="qwen2",
    names=LLAMA_NAMES,
    gguf_arch="qwen2",
    defaults={
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    qkv_bias=True,
    windows="max_window_layers",
)
