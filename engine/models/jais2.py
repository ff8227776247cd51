"""Jais 2: LayerNorm, biases everywhere but in the output layer, ReLU squared without a gate."""

from __future__ import annotations

from dataclasses import replace

from engine.models.arcee import ARCEE, ARCEE_NAMES
from engine.models.family import HF_NORM_BIASES

__all__ = ["JAIS2"]

JAIS2 = replace(
    ARCEE,
    model_type="jais2",
    names=(*ARCEE_NAMES, *HF_NORM_BIASES),
    defaults={
        "max_position_embeddings": 8192,
        "layer_norm_eps": 1e-5,
        "hidden_act": "relu2",
        "attention_bias": True,
        "mlp_bias": True,
        "bos_token_id": 0,
        "eos_token_id": 150024,
    },
    eps_key="layer_norm_eps",
    layer_norm=True,
    norm_bias=True,
)
