"""GPT-Neo: GPT-2 with windows in every second layer, scores without a scale, linear layers."""

from __future__ import annotations

from dataclasses import replace

from engine.models.family import linear_names
from engine.models.gpt2 import GPT2, GPT2_NAMES

__all__ = ["GPT_NEO"]

_LAYER = "transformer.h.{i}"
_ATTENTION = f"{_LAYER}.attn.attention"

GPT_NEO = replace(
    GPT2,
    model_type="gpt_neo",
    names=(
        *GPT2_NAMES,
        *linear_names(f"{_ATTENTION}.q_proj", "qkv", "q"),
        *linear_names(f"{_ATTENTION}.k_proj", "qkv", "k"),
        *linear_names(f"{_ATTENTION}.v_proj", "qkv", "v"),
        *linear_names(f"{_ATTENTION}.out_proj", "o"),
        *linear_names(f"{_LAYER}.mlp.c_fc", "up"),
        *linear_names(f"{_LAYER}.mlp.c_proj", "down"),
    ),
    gguf_names=(),
    gguf_arch="",
    defaults={
        "max_position_embeddings": 2048,
        "layer_norm_epsilon": 1e-5,
        "hidden_act": "gelu_new",
        "sliding_window": 256,
        "tie_word_embeddings": True,
        "bos_token_id": 50256,
        "eos_token_id": 50256,
    },
    key_aliases={
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "window_size": "sliding_window",
        "activation_function": "hidden_act",
    },
    attn_scale=1.0,
    qkv_bias=False,
    windows="attention_types",
)
