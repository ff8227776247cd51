"""DeepSeek-V2 and V3 (R1, V3.1), Kimi K2: latent attention and many small experts."""

from __future__ import annotations

from dataclasses import replace

from engine.models.expert_names import (
    fused_expert_names,
    router_names,
    separate_expert_names,
    shared_expert_names,
)
from engine.models.family import HF_NAMES, Family, TensorName, linear_names
from engine.models.glm4_moe import GLM4_EXPERTS
from engine.models.mtp_family import NEXTN

__all__ = ["DEEPSEEK_V2", "DEEPSEEK_V3", "KIMI_K2", "MLA_NAMES", "latent_names"]


def latent_names(block: str, *, form: str = "") -> tuple[TensorName, ...]:
    """Name the tensors of latent attention in `block`, without its output projection.

    `form`: see `TensorName`.
    """
    names = (
        *linear_names(f"{block}.q_proj", "mla_in", "mla_q"),
        *linear_names(f"{block}.q_a_proj", "mla_in", "mla_q_latent"),
        *linear_names(f"{block}.kv_a_proj_with_mqa", "mla_in", "mla_kv_latent"),
        TensorName(f"{block}.q_a_layernorm.weight", "mla_q_norm"),
        TensorName(f"{block}.q_b_proj.weight", "mla_q_up", "mla_q_of_latent"),
        TensorName(f"{block}.kv_a_layernorm.weight", "mla_kv_norm"),
        TensorName(f"{block}.kv_b_proj.weight", "mla_kv_up", "mla_kv"),
    )
    return tuple(name._replace(form=form) for name in names)


MLA_NAMES: tuple[TensorName, ...] = (
    *(name for name in HF_NAMES if name.kind not in ("o", "o_bias")),
    TensorName("model.layers.{i}.post_attention_layernorm.weight", "mlp_norm"),
    *latent_names("model.layers.{i}.self_attn"),
    *linear_names("model.layers.{i}.self_attn.o_proj", "mla_out"),
    *linear_names("model.layers.{i}.mlp.gate_proj", "gate_up", "gate"),
    *linear_names("model.layers.{i}.mlp.up_proj", "gate_up", "up"),
)
"""Names of a model with latent attention and an MLP."""

_EXPERT_NAMES: tuple[TensorName, ...] = (
    *router_names("mlp.gate"),
    TensorName("model.layers.{i}.mlp.gate.e_score_correction_bias", "router_correction"),
    *separate_expert_names("mlp"),
    *fused_expert_names(),
    *shared_expert_names("mlp.shared_experts"),
)

_EXPERTS = replace(GLM4_EXPERTS, num_experts=256)

DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    names=(*MLA_NAMES, *_EXPERT_NAMES),
    gguf_names=(),
    defaults={
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    interleaved_rope="rope_interleave",
    mla=True,
    extra_layers="num_nextn_predict_layers",
    mtp=NEXTN,
    moe=_EXPERTS,
)

KIMI_K2 = replace(DEEPSEEK_V3, model_type="kimi_k2")

DEEPSEEK_V2 = replace(
    DEEPSEEK_V3,
    model_type="deepseek_v2",
    defaults={
        **DEEPSEEK_V3.defaults,
        "max_position_embeddings": 2048,
        "intermediate_size": 11008,
        "moe_intermediate_size": 1407,
        "n_shared_experts": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 0,
        "routed_scaling_factor": 1.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    interleaved_rope=True,
    extra_layers="",
    mtp=None,
    moe=replace(
        _EXPERTS,
        num_experts=64,
        renormalize=False,
        score="softmax",
        correction=False,
        choice_key="topk_method",
    ),
)
