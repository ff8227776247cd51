"""Mixtral: mistral with experts."""

from __future__ import annotations

from engine.models.expert_names import (
    GGUF_EXPERT_NAMES,
    fused_expert_names,
    router_names,
    separate_expert_names,
)
from engine.models.family import GGUF_SPLIT_NAMES, Family
from engine.models.llama import LLAMA_NAMES
from engine.models.moe_family import MoeFamily

__all__ = ["MIXTRAL"]

MIXTRAL = Family(
    model_type="mixtral",
    names=(
        *LLAMA_NAMES,
        *router_names("block_sparse_moe.gate", "mlp.gate"),
        *separate_expert_names("block_sparse_moe", gate="w1", up="w3", down="w2"),
        *fused_expert_names(),
    ),
    gguf_names=(*GGUF_SPLIT_NAMES, *GGUF_EXPERT_NAMES),
    # NOTE: Mixtral's .gguf files declare "llama", and store rows in llama's order.
    gguf_interleaved_rope=True,
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096 * 32,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_experts_per_tok": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    windows="every_layer",
    moe=MoeFamily(num_experts=8),
)
