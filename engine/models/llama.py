"""Llama 2 and 3.x, SmolLM2 and every other model of type "llama"."""

from __future__ import annotations

from engine.models.family import HF_LAYER_NAMES, HF_NAMES, Family, TensorName

__all__ = ["LLAMA", "LLAMA_NAMES"]

LLAMA_NAMES: tuple[TensorName, ...] = (
    *HF_NAMES,
    *HF_LAYER_NAMES,
    TensorName("model.layers.{i}.post_attention_layernorm.weight", "mlp_norm"),
)
"""Names of a checkpoint with two norms per layer: llama, mistral, qwen2 and qwen3."""

LLAMA = Family(
    model_type="llama",
    names=LLAMA_NAMES,
    gguf_arch="llama",
    gguf_interleaved_rope=True,
    defaults={
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    mlp_bias="mlp_bias",
)
