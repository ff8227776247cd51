"""Trinity: gated attention, norms before and after branches, sigmoid routing, rope in windows."""

from __future__ import annotations

from engine.models.expert_names import (
    fused_expert_names,
    router_names,
    separate_expert_names,
    shared_expert_names,
)
from engine.models.family import HF_LAYER_NAMES, HF_NAMES, Family, TensorName
from engine.models.moe_family import MoeFamily

__all__ = ["AFMOE"]

_LAYER = "model.layers.{i}"

AFMOE = Family(
    model_type="afmoe",
    names=(
        *HF_NAMES,
        *HF_LAYER_NAMES,
        TensorName(f"{_LAYER}.self_attn.gate_proj.weight", "qkv", "attn_gate"),
        TensorName(f"{_LAYER}.post_attention_layernorm.weight", "post_attn_norm"),
        TensorName(f"{_LAYER}.pre_mlp_layernorm.weight", "mlp_norm"),
        TensorName(f"{_LAYER}.post_mlp_layernorm.weight", "post_mlp_norm"),
        *router_names("mlp.router.gate"),
        TensorName(f"{_LAYER}.mlp.expert_bias", "router_correction"),
        *separate_expert_names("mlp"),
        *fused_expert_names(),
        *shared_expert_names("mlp.shared_experts"),
    ),
    gguf_names=(),
    defaults={
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-5,
        "head_dim": 128,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "sliding_window": 1024,
        "sliding_window_pattern": 4,
    },
    key_aliases={
        "global_attn_every_n_layers": "sliding_window_pattern",
        "num_dense_layers": "first_k_dense_replace",
        "num_shared_experts": "n_shared_experts",
        "route_scale": "routed_scaling_factor",
    },
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm=True,
    post_norms=True,
    windows="pattern",
    rope_layers="windows",
    scale_embedding="mup_enabled",
    attn_gate="sigmoid",
    moe=MoeFamily(
        num_experts=64,
        width="moe_intermediate_size",
        sparse_layers="after_first",
        score="sigmoid",
        correction=True,
        scale="routed_scaling_factor",
        shared_count="n_shared_experts",
    ),
)
