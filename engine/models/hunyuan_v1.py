"""Hunyuan, 0.5B to 7B and A13B: norms of q and k after the rotation, rope with a fixed alpha."""

from __future__ import annotations

from dataclasses import replace

from engine.models.expert_names import (
    fused_expert_names,
    router_names,
    separate_expert_names,
    shared_expert_names,
)
from engine.models.family import Family, TensorName
from engine.models.llama import LLAMA_NAMES
from engine.models.moe_family import MoeFamily

__all__ = ["HUNYUAN_V1_DENSE", "HUNYUAN_V1_MOE"]

_ATTENTION = "model.layers.{i}.self_attn"

HUNYUAN_V1_DENSE = Family(
    model_type="hunyuan_v1_dense",
    names=(
        *(name for name in LLAMA_NAMES if name.kind not in ("q_norm", "k_norm")),
        TensorName(f"{_ATTENTION}.query_layernorm.weight", "q_norm"),
        TensorName(f"{_ATTENTION}.key_layernorm.weight", "k_norm"),
    ),
    gguf_names=(),
    defaults={
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    },
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm=True,
    qk_norm_after_rope=True,
    rope_alpha=True,
)

HUNYUAN_V1_MOE = replace(
    HUNYUAN_V1_DENSE,
    model_type="hunyuan_v1_moe",
    names=(
        *HUNYUAN_V1_DENSE.names,
        *router_names("mlp.gate.wg"),
        *separate_expert_names("mlp"),
        *fused_expert_names(),
        *shared_expert_names("mlp.shared_mlp"),
    ),
    defaults={**HUNYUAN_V1_DENSE.defaults, "num_experts_per_tok": 1},
    key_aliases={"moe_topk": "num_experts_per_tok"},
    moe=MoeFamily(num_experts=1, shared_width="intermediate_size"),
)
