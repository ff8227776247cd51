"""InternLM3 and IQuest-Coder: Llama under model types of their own."""

from __future__ import annotations

from dataclasses import replace

from engine.models.llama import LLAMA

__all__ = ["INTERNLM3", "IQUESTCODER"]

INTERNLM3 = replace(
    LLAMA,
    model_type="internlm3",
    gguf_names=(),
    gguf_arch="",
    gguf_interleaved_rope=False,
    defaults={
        "head_dim": 128,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    },
    key_aliases={"qkv_bias": "attention_bias", "bias": "mlp_bias"},
    o_bias="mlp_bias",
)
"""Its key `bias` is about the output projection and the MLP."""

IQUESTCODER = replace(
    INTERNLM3,
    model_type="iquestcoder",
    defaults={
        "head_dim": 128,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    key_aliases={},
    o_bias="attention_bias",
)
