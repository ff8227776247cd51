"""Command A with experts: cohere2 with dense layers first, and a shared expert that may average."""

from __future__ import annotations

from dataclasses import replace

from engine.models.cohere2 import COHERE2
from engine.models.expert_names import (
    fused_expert_names,
    router_names,
    separate_expert_names,
    shared_expert_names,
)
from engine.models.moe_family import MoeFamily

__all__ = ["COHERE2_MOE"]

COHERE2_MOE = replace(
    COHERE2,
    model_type="cohere2_moe",
    names=(
        *COHERE2.names,
        *router_names("mlp.gate"),
        *separate_expert_names("mlp"),
        *fused_expert_names(),
        *shared_expert_names("mlp.shared_experts"),
    ),
    gguf_names=(),
    gguf_arch="",
    gguf_interleaved_rope=False,
    defaults={
        **COHERE2.defaults,
        "head_dim": 128,
        "num_experts_per_tok": 2,
        "n_shared_experts": 0,
        "first_k_dense_replace": 0,
        "prefix_dense_sliding_window_pattern": 1,
        "expert_selection_fn": "softmax",
        "norm_topk_prob": True,
        "shared_expert_combination_strategy": "average",
        "bos_token_id": 5,
        "eos_token_id": 255001,
        "pad_token_id": 0,
    },
    key_aliases={"num_shared_experts": "n_shared_experts"},
    mlp_width="prefix_dense_intermediate_size",
    rms_norm_key="rms_norm_eps",
    windows="pattern_after_dense",
    rope_layers="windows_and_dense",
    moe=MoeFamily(
        num_experts=8,
        renormalize="norm_topk_prob",
        sparse_layers="after_first",
        lists_layers=True,
        score_key="expert_selection_fn",
        shared_count="n_shared_experts",
        shared_sum="shared_expert_combination_strategy",
    ),
)
