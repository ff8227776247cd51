"""Phi-3 and Phi-4-mini: qkv and gate_up are packed, rope may be partial or longrope."""

from __future__ import annotations

from engine.models.family import GGUF_PACKED_NAMES, HF_NAMES, Family, TensorName

__all__ = ["PHI3"]

PHI3 = Family(
    model_type="phi3",
    names=(
        *HF_NAMES,
        TensorName("model.layers.{i}.self_attn.qkv_proj.weight", "qkv"),
        TensorName("model.layers.{i}.mlp.gate_up_proj.weight", "gate_up"),
        TensorName("model.layers.{i}.post_attention_layernorm.weight", "mlp_norm"),
    ),
    gguf_names=GGUF_PACKED_NAMES,
    gguf_arch="phi3",
    defaults={
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 1.0,
        "bos_token_id": 1,
        "eos_token_id": 32000,
        "pad_token_id": 32000,
    },
    windows="every_layer",
    # The first releases called longrope "su", and one of them "yarn".
    rope_aliases={"su": "longrope", "yarn": "longrope"},
)
