"""MiniCPM3: latent attention with an MLP; factors on embedding, branches and logits."""

from __future__ import annotations

from engine.models.deepseek import MLA_NAMES
from engine.models.family import Family

__all__ = ["MINICPM3"]

MINICPM3 = Family(
    model_type="minicpm3",
    names=MLA_NAMES,
    gguf_names=(),
    defaults={
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "q_lora_rank": 768,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "intermediate_size": 6400,
        "tie_word_embeddings": True,
        "scale_emb": 12,
        "scale_depth": 1.4,
        "dim_model_base": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    mlp_bias="mlp_bias",
    mla=True,
    depth_scales=True,
)
