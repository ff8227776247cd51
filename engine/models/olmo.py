"""OLMo 1: LayerNorms without weights, limits on q, k and v in some models."""

from __future__ import annotations

from engine.models.family import HF_LAYER_NAMES, HF_NAMES, Family

__all__ = ["OLMO"]

OLMO = Family(
    model_type="olmo",
    names=(
        *(name for name in HF_NAMES if "norm" not in name.kind),
        *(name for name in HF_LAYER_NAMES if "norm" not in name.kind),
    ),
    gguf_names=(),
    defaults={
        "max_position_embeddings": 2048,
        "layer_norm_eps": 1e-5,
        "clip_qkv": None,
        "eos_token_id": 50279,
        "pad_token_id": 1,
    },
    eps_key="layer_norm_eps",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    layer_norm=True,
    norm_weight=False,
)
