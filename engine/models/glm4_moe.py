"""GLM-4.5 and 4.6: sigmoid routing with a correction bias, a shared expert, half-rotary heads."""

from __future__ import annotations

from engine.models.expert_names import (
    GGUF_EXPERT_NAMES,
    GGUF_SHARED_EXPERT_NAMES,
    correction_names,
    fused_expert_names,
    router_names,
    separate_expert_names,
    shared_expert_names,
)
from engine.models.family import GGUF_SPLIT_NAMES, Family, TensorName
from engine.models.llama import LLAMA_NAMES
from engine.models.moe_family import MoeFamily
from engine.models.mtp_family import NEXTN

__all__ = ["GLM4_EXPERTS", "GLM4_MOE"]

GLM4_EXPERTS = MoeFamily(
    num_experts=128,
    width="moe_intermediate_size",
    renormalize="norm_topk_prob",
    sparse_layers="after_first",
    score="sigmoid",
    correction=True,
    scale="routed_scaling_factor",
    has_groups=True,
    shared_count="n_shared_experts",
)
"""Routing of DeepSeek-V3's kind."""

GLM4_MOE = Family(
    model_type="glm4_moe",
    names=(
        *LLAMA_NAMES,
        *router_names("mlp.gate"),
        *correction_names("mlp.gate.e_score_correction_bias"),
        *separate_expert_names("mlp"),
        *fused_expert_names(),
        *shared_expert_names("mlp.shared_experts"),
    ),
    gguf_names=(
        *(name for name in GGUF_SPLIT_NAMES if name.kind not in ("mlp_norm", "post_attn_norm")),
        TensorName("blk.{i}.post_attention_norm.weight", "mlp_norm"),
        *GGUF_EXPERT_NAMES,
        *GGUF_SHARED_EXPERT_NAMES,
    ),
    gguf_arch="glm4moe",
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
    },
    qkv_bias="attention_bias",
    qk_norm="use_qk_norm",
    extra_layers="num_nextn_predict_layers",
    mtp=NEXTN,
    moe=GLM4_EXPERTS,
)
