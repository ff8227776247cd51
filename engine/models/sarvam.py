"""Sarvam 30B and 105B: GLM-4.5's and DeepSeek-V3's layers under names of their own."""

from __future__ import annotations

from dataclasses import replace

from engine.models.deepseek import DEEPSEEK_V3
from engine.models.expert_names import (
    correction_names,
    fused_expert_names,
    router_names,
    separate_expert_names,
    shared_expert_names,
)
from engine.models.family import HF_LAYER_NAMES, HF_NAMES, TensorName, linear_names
from engine.models.glm4_moe import GLM4_MOE

__all__ = ["SARVAM_MLA", "SARVAM_MOE"]

_LAYER = "model.layers.{i}"
_ATTENTION = f"{_LAYER}.attention"
_ALIASES = {
    "num_shared_experts": "n_shared_experts",
    "num_mtp_layers": "num_nextn_predict_layers",
}

SARVAM_MOE = replace(
    GLM4_MOE,
    model_type="sarvam_moe",
    names=(
        TensorName("model.word_embeddings.weight", "embed"),
        *(name for name in HF_NAMES if name.kind not in ("embed", "o", "o_bias")),
        *linear_names(f"{_ATTENTION}.query_key_value", "qkv"),
        TensorName(f"{_ATTENTION}.dense.weight", "o"),
        TensorName(f"{_ATTENTION}.query_layernorm.weight", "q_norm"),
        TensorName(f"{_ATTENTION}.key_layernorm.weight", "k_norm"),
        TensorName(f"{_LAYER}.post_attention_layernorm.weight", "mlp_norm"),
        *(name for name in HF_LAYER_NAMES if ".mlp." in name.checkpoint),
        *router_names("mlp.gate"),
        *correction_names("mlp.gate.expert_bias"),
        *separate_expert_names("mlp"),
        *fused_expert_names(),
        *shared_expert_names("mlp.shared_experts"),
    ),
    gguf_names=(),
    gguf_arch="",
    defaults={
        **GLM4_MOE.defaults,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 8e6,
        "partial_rotary_factor": 1.0,
        "intermediate_size": 8192,
        "moe_intermediate_size": 1024,
        "num_experts_per_tok": 6,
        "routed_scaling_factor": 2.5,
        "use_qk_norm": True,
        "eos_token_id": 1,
        "pad_token_id": 0,
    },
    key_aliases={**_ALIASES, "use_qkv_bias": "attention_bias"},
    mtp=None,
)

assert DEEPSEEK_V3.moe is not None

SARVAM_MLA = replace(
    DEEPSEEK_V3,
    model_type="sarvam_mla",
    defaults={
        **{key: value for key, value in DEEPSEEK_V3.defaults.items() if key != "q_lora_rank"},
        "intermediate_size": 16384,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    key_aliases=_ALIASES,
    rope_aliases={"deepseek_yarn": "yarn"},
    mtp=None,
    moe=replace(DEEPSEEK_V3.moe, num_experts=128),
)
