"""Mistral: llama with a sliding window in every layer, if the config sets one."""

from __future__ import annotations

from dataclasses import replace

from engine.models.family import Family
from engine.models.llama import LLAMA_NAMES

__all__ = ["MINISTRAL", "MINISTRAL3", "MISTRAL"]

MISTRAL = Family(
    model_type="mistral",
    names=LLAMA_NAMES,
    # NOTE: Mistral's .gguf files declare "llama", and store rows in llama's order.
    gguf_interleaved_rope=True,
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096 * 32,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    windows="every_layer",
)

MINISTRAL = replace(MISTRAL, model_type="ministral", gguf_names=(), gguf_interleaved_rope=False)
"""Mistral with `layer_types`, as transformers 5 names it: a window in some layers. No .gguf."""

MINISTRAL3 = replace(
    MISTRAL,
    model_type="ministral3",
    gguf_arch="mistral3",
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 11,
    },
    q_scale=True,
)
"""Mistral with YaRN, and queries that grow with their position."""
