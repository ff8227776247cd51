"""HyperCLOVA X: Granite with norms after each branch, and a factor on the logits."""

from __future__ import annotations

from engine.models.family import Family, TensorName
from engine.models.llama import LLAMA_NAMES

__all__ = ["HYPERCLOVAX"]

HYPERCLOVAX = Family(
    model_type="hyperclovax",
    names=(
        *LLAMA_NAMES,
        TensorName("model.layers.{i}.post_norm1.weight", "post_attn_norm"),
        TensorName("model.layers.{i}.post_norm2.weight", "post_mlp_norm"),
    ),
    gguf_names=(),
    defaults={
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "use_post_norm": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    mlp_bias="mlp_bias",
    post_norms="use_post_norm",
    multipliers=True,
    logit_scale="logits_scaling",
)
