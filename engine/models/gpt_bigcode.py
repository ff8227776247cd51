"""StarCoder and SantaCoder: GPT-2 with one key/value head, in linear layers."""

from __future__ import annotations

from dataclasses import replace

from engine.models.family import linear_names
from engine.models.gpt2 import GPT2, GPT2_DEFAULTS, GPT2_NAMES

__all__ = ["GPT_BIGCODE"]

_LAYER = "transformer.h.{i}"

GPT_BIGCODE = replace(
    GPT2,
    model_type="gpt_bigcode",
    names=(
        *GPT2_NAMES,
        *linear_names(f"{_LAYER}.attn.c_attn", "qkv", "q|k|v"),
        *linear_names(f"{_LAYER}.attn.c_proj", "o"),
        *linear_names(f"{_LAYER}.mlp.c_fc", "up"),
        *linear_names(f"{_LAYER}.mlp.c_proj", "down"),
    ),
    gguf_arch="starcoder",
    defaults={**GPT2_DEFAULTS, "hidden_act": "gelu_pytorch_tanh"},
    multi_query=True,
)
