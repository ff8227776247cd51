"""Seed-OSS: Llama with a bias on q, k and v, and none on the output of attention."""

from __future__ import annotations

from engine.models.family import GGUF_SPLIT_NAMES, Family, TensorName
from engine.models.llama import LLAMA_NAMES

__all__ = ["SEED_OSS"]

SEED_OSS = Family(
    model_type="seed_oss",
    names=LLAMA_NAMES,
    gguf_names=(
        *(name for name in GGUF_SPLIT_NAMES if name.kind not in ("mlp_norm", "post_attn_norm")),
        TensorName("blk.{i}.post_attention_norm.weight", "mlp_norm"),
    ),
    gguf_arch="seed_oss",
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 524288,
        "rms_norm_eps": 1e-6,
        "attention_bias": True,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 1,
    },
    qkv_bias="attention_bias",
    o_bias="attention_out_bias",
    mlp_bias="mlp_bias",
)
