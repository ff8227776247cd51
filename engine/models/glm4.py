"""GLM-4 (0414): norms before and after each branch, biases of q, k and v, half-rotary heads."""

from __future__ import annotations

from dataclasses import replace

from engine.models.family import (
    GGUF_PACKED_MLP_NAMES,
    HF_LAYER_NAMES,
    HF_NAMES,
    Family,
    TensorName,
)

__all__ = ["GLM", "GLM4"]

GLM4 = Family(
    model_type="glm4",
    names=(
        *HF_NAMES,
        *(name for name in HF_LAYER_NAMES if name.kind in ("qkv", "qkv_bias")),
        TensorName("model.layers.{i}.mlp.gate_up_proj.weight", "gate_up"),
        # NOTE: in other families post_attention_layernorm normalises the attention output.
        TensorName("model.layers.{i}.post_self_attn_layernorm.weight", "post_attn_norm"),
        TensorName("model.layers.{i}.post_attention_layernorm.weight", "mlp_norm"),
        TensorName("model.layers.{i}.post_mlp_layernorm.weight", "post_mlp_norm"),
    ),
    gguf_names=GGUF_PACKED_MLP_NAMES,
    gguf_arch="glm4",
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1.5625e-7,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
    },
    qkv_bias="attention_bias",
    post_norms=True,
    interleaved_rope=True,
    gguf_interleaved_rope=True,
)

GLM = replace(
    GLM4,
    model_type="glm",
    gguf_names=(
        *(name._replace(form="split" if "qkv" in name.kind else "") for name in GLM4.gguf_names),
        # As converted from the first releases.
        TensorName("blk.{i}.attn_qkv.weight", "qkv", form="packed"),
        TensorName("blk.{i}.attn_qkv.bias", "qkv_bias", form="packed"),
    ),
    gguf_arch="chatglm",
    post_norms=False,
)
"""GLM-4-9b: the same without the norms after each branch."""
