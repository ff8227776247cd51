"""EXAONE 4: norms of q, k and of outputs; 3 of 4 layers have a window, and only these have rope."""

from __future__ import annotations

from dataclasses import replace

from engine.models.expert_names import (
    GGUF_EXPERT_NAMES,
    GGUF_SHARED_EXPERT_NAMES,
    correction_names,
    fused_expert_names,
    router_names,
    separate_expert_names,
    shared_expert_names,
)
from engine.models.family import GGUF_SPLIT_NAMES
from engine.models.glm4_moe import GLM4_EXPERTS
from engine.models.llama import LLAMA_NAMES
from engine.models.olmo2 import OLMO2

__all__ = ["EXAONE4", "EXAONE_MOE"]

EXAONE4 = replace(
    OLMO2,
    model_type="exaone4",
    gguf_arch="exaone4",
    defaults={
        "num_key_value_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "bos_token_id": 0,
        "eos_token_id": 2,
    },
    qkv_bias=False,
    o_bias=False,
    whole_qk_norm=False,
    windows="pattern",
    rope_layers="windows_if_set",
)

EXAONE_MOE = replace(
    EXAONE4,
    model_type="exaone_moe",
    names=(
        *LLAMA_NAMES,
        *router_names("mlp.gate"),
        *correction_names("mlp.e_score_correction_bias", "mlp.gate.e_score_correction_bias"),
        *separate_expert_names("mlp"),
        *fused_expert_names(),
        *shared_expert_names("mlp.shared_experts"),
    ),
    gguf_names=(*GGUF_SPLIT_NAMES, *GGUF_EXPERT_NAMES, *GGUF_SHARED_EXPERT_NAMES),
    gguf_arch="exaone-moe",
    defaults={
        **EXAONE4.defaults,
        "moe_intermediate_size": 1024,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "bos_token_id": 1,
        "eos_token_id": 53,
        "pad_token_id": 0,
    },
    pre_norms=True,
    post_norms=False,
    extra_layers="num_nextn_predict_layers",
    moe=replace(GLM4_EXPERTS, num_experts=64, lists_layers=True, shared_count="num_shared_experts"),
)
"""K-EXAONE: the same with norms before each branch, and experts after the first layers."""
