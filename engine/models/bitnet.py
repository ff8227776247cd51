"""BitNet b1.58: norms before the output projections, an MLP with ReLU squared, ternary weights."""

from __future__ import annotations

from engine.models.family import Family, TensorName
from engine.models.llama import LLAMA_NAMES

__all__ = ["BITNET"]

BITNET = Family(
    model_type="bitnet",
    names=(
        *LLAMA_NAMES,
        TensorName("model.layers.{i}.self_attn.attn_sub_norm.weight", "o_norm"),
        TensorName("model.layers.{i}.mlp.ffn_sub_norm.weight", "down_norm"),
    ),
    gguf_names=(),
    defaults={
        "num_key_value_heads": 5,
        "max_position_embeddings": 2048,
        "intermediate_size": 6912,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "relu2",
    },
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    inner_norms=True,
)
