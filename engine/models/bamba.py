"""Bamba: Mamba-2, and attention with rope on half of a head in some layers."""

from __future__ import annotations

from dataclasses import replace

from engine.models.falcon_h1 import FALCON_H1
from engine.models.mixer_family import FULL_ATTENTION, MixerFamily

__all__ = ["BAMBA"]

BAMBA = replace(
    FALCON_H1,
    model_type="bamba",
    defaults={
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "partial_rotary_factor": 0.5,
        "attn_layer_indices": [],
        "mamba_n_heads": 128,
        "mamba_d_head": "auto",
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    },
    weight_multipliers=False,
    mixers=MixerFamily(
        {FULL_ATTENTION: "attention", "linear_attention": "mamba2"},
        full_layers="attn_layer_indices",
    ),
)
