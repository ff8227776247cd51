"""StableLM: LayerNorm, rope on a quarter of each head; some models with parallel blocks."""

from __future__ import annotations

from engine.models.family import (
    GGUF_NORM_BIASES,
    GGUF_SPLIT_NAMES,
    HF_NORM_BIASES,
    Family,
    own_norm_names,
)
from engine.models.llama import LLAMA_NAMES

__all__ = ["STABLELM"]

STABLELM = Family(
    model_type="stablelm",
    names=own_norm_names((*LLAMA_NAMES, *HF_NORM_BIASES), "layernorm.norms.{e}"),
    gguf_names=own_norm_names((*GGUF_SPLIT_NAMES, *GGUF_NORM_BIASES)),
    gguf_arch="stablelm",
    defaults={
        "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
        "layer_norm_eps": 1e-5,
        "partial_rotary_factor": 0.25,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    eps_key="layer_norm_eps",
    qkv_bias="use_qkv_bias",
    layer_norm=True,
    norm_bias=True,
    qk_norm="qk_layernorm",
    own_qk_norms=True,
    parallel="use_parallel_residual",
)
