"""Mistral: llama with a sliding window in every layer, if the config sets one."""

from __future__ import annotations

from dataclasses import replace

from engine.models.family import Family
from engine.models.llama import LLAMA_NAMES

__all__ = ["MINISTRAL", "MISTRAL"]

MISTRAL = Family(
    model_type="mistral",
    names=LLAMA_NAMES,
    # NOTE: Mistral's .gguf files declare "llama", and store rows in llama's order.
    gguf_interleaved_rope=True,
    defaults={
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
