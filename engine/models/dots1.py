"""dots.llm1: Qwen3's attention, experts with sigmoid routing and a correction, shared experts."""

from __future__ import annotations

from dataclasses import replace

from engine.models.expert_names import GGUF_EXPERT_NAMES, GGUF_SHARED_EXPERT_NAMES
from engine.models.family import GGUF_SPLIT_NAMES
from engine.models.glm4_moe import GLM4_MOE

__all__ = ["DOTS1"]

DOTS1 = replace(
    GLM4_MOE,
    model_type="dots1",
    gguf_names=(*GGUF_SPLIT_NAMES, *GGUF_EXPERT_NAMES, *GGUF_SHARED_EXPERT_NAMES),
    gguf_arch="dots1",
    defaults={
        "num_key_value_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
        "sliding_window": 4096,
        "max_window_layers": 62,
    },
    o_bias="attention_bias",
    qk_norm=True,
    windows="last_layers",
    extra_layers="",
)
