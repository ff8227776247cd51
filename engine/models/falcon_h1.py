"""Falcon-H1: attention and Mamba-2 side by side in every layer, with factors on every branch."""

from __future__ import annotations

from engine.models.family import HF_ATTENTION_NAMES, Family, TensorName, linear_names
from engine.models.granitemoehybrid import mamba_names
from engine.models.mixer_family import MixerFamily

__all__ = ["FALCON_H1"]

_LAYER = "model.layers.{i}"
_MLP = f"{_LAYER}.feed_forward"

FALCON_H1 = Family(
    model_type="falcon_h1",
    names=(
        TensorName("model.embed_tokens.weight", "embed"),
        TensorName("model.final_layernorm.weight", "final_norm"),
        TensorName("lm_head.weight", "lm_head"),
        TensorName(f"{_LAYER}.input_layernorm.weight", "attn_norm"),
        TensorName(f"{_LAYER}.pre_ff_layernorm.weight", "mlp_norm"),
        *HF_ATTENTION_NAMES,
        *linear_names(f"{_LAYER}.self_attn.o_proj", "o"),
        *mamba_names(f"{_LAYER}.mamba"),
        *linear_names(f"{_MLP}.gate_proj", "gate_up", "gate"),
        *linear_names(f"{_MLP}.up_proj", "gate_up", "up"),
        *linear_names(f"{_MLP}.down_proj", "down"),
    ),
    gguf_names=(),
    defaults={
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "mamba_d_ssm": 1024,  # null: `mamba_expand` times the hidden size
        "mamba_n_heads": 128,
        "mamba_d_head": "auto",
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_rms_norm": False,
        "mamba_norm_before_gate": True,
        "projectors_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    },
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    mlp_bias="mlp_bias",
    weight_multipliers=True,
    mixers=MixerFamily({"hybrid": "attention_mamba2"}),
)
