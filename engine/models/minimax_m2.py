"""MiniMax-M2: experts with sigmoid routing and a correction; norms of q and k over all heads."""

from __future__ import annotations

from engine.models.expert_names import (
    GGUF_EXPERT_NAMES,
    GGUF_SHARED_EXPERT_NAMES,
    correction_names,
    fused_expert_names,
    router_names,
    separate_expert_names,
)
from engine.models.family import GGUF_SPLIT_NAMES, Family
from engine.models.llama import LLAMA_NAMES
from engine.models.moe_family import MoeFamily

__all__ = ["MINIMAX_M2"]

_BLOCK = "block_sparse_moe"

MINIMAX_M2 = Family(
    model_type="minimax_m2",
    names=(
        *LLAMA_NAMES,
        *router_names(f"{_BLOCK}.gate", "mlp.gate"),
        *correction_names(f"{_BLOCK}.e_score_correction_bias", "mlp.e_score_correction_bias"),
        *separate_expert_names(_BLOCK, gate="w1", up="w3", down="w2"),
        *fused_expert_names(),
    ),
    gguf_names=(*GGUF_SPLIT_NAMES, *GGUF_EXPERT_NAMES, *GGUF_SHARED_EXPERT_NAMES),
    gguf_arch="minimax-m2",
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 196608,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5e6,
        "num_experts_per_tok": 8,
        "bos_token_id": 200034,
        "eos_token_id": 200020,
    },
    qk_norm=True,
    whole_qk_norm=True,
    rotary_dim="rotary_dim",
    moe=MoeFamily(num_experts=256, score="sigmoid", correction=True),
)
