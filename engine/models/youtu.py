"""Youtu-LLM: latent attention, dense, tied."""

from __future__ import annotations

from engine.models.deepseek import MLA_NAMES
from engine.models.family import Family

__all__ = ["YOUTU"]

YOUTU = Family(
    model_type="youtu",
    names=MLA_NAMES,
    gguf_names=(),
    defaults={
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "intermediate_size": 6144,
        "tie_word_embeddings": True,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    interleaved_rope="rope_interleave",
    mla=True,
)
