"""FlexOlmo: OLMoE's experts with OLMo 2's norms of outputs."""

from __future__ import annotations

from dataclasses import replace

from engine.models.expert_names import fused_expert_names, router_names, separate_expert_names
from engine.models.moe_family import MoeFamily
from engine.models.olmo2 import OLMO2
from engine.models.olmoe import OLMOE

__all__ = ["FLEX_OLMO"]

FLEX_OLMO = replace(
    OLMOE,
    model_type="flex_olmo",
    names=(
        *OLMO2.names,
        *router_names("mlp.gate"),
        *separate_expert_names("mlp"),
        *fused_expert_names(),
    ),
    gguf_names=(),
    gguf_arch="",
    defaults={
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5e5,
        "num_experts_per_tok": 5,
        "eos_token_id": 100257,
        "pad_token_id": 100277,
    },
    pre_norms=False,
    post_norms=True,
    moe=MoeFamily(num_experts=7, renormalize="norm_topk_prob"),
)
