"""Nemotron 3 and 4, Minitron: LayerNorm with weight 1 + w, ReLU squared, half-rotary heads."""

from __future__ import annotations

from dataclasses import replace

from engine.models.arcee import ARCEE, ARCEE_NAMES
from engine.models.family import HF_NORM_BIASES

__all__ = ["NEMOTRON"]

NEMOTRON = replace(
    ARCEE,
    model_type="nemotron",
    names=(*ARCEE_NAMES, *HF_NORM_BIASES),
    defaults={
        "max_position_embeddings": 4096,
        "norm_eps": 1e-5,
        "hidden_act": "relu2",
        "partial_rotary_factor": 0.5,
        "bos_token_id": 2,
        "eos_token_id": 3,
    },
    eps_key="norm_eps",
    layer_norm=True,
    norm_bias=True,
    norm_weight_offset=1.0,
)
