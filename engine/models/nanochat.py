"""nanochat: RMSNorms without weights, of the embedding too; rope backwards; ReLU squared."""

from __future__ import annotations

from engine.models.family import HF_ATTENTION_NAMES, HF_NAMES, Family, TensorName

__all__ = ["NANOCHAT"]

_MLP = "model.layers.{i}.mlp"

NANOCHAT = Family(
    model_type="nanochat",
    names=(
        *(name for name in HF_NAMES if "norm" not in name.kind and "mlp" not in name.checkpoint),
        *(name for name in HF_ATTENTION_NAMES if "norm" not in name.kind),
        TensorName(f"{_MLP}.fc1.weight", "up"),
        TensorName(f"{_MLP}.fc2.weight", "down"),
    ),
    gguf_names=(),
    defaults={
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "hidden_act": "relu2",
        "final_logit_softcapping": 15.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 1,
    },
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm=True,
    qk_norm_after_rope=True,
    norm_weight=False,
    embed_norm=True,
    reversed_rope=True,
    gated_mlp=False,
)
