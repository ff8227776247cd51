"""MiMo-V2-Flash: five of six layers with a window, sinks and twice the K/V heads; narrow values."""

from __future__ import annotations

from engine.models.expert_names import fused_expert_names, router_names, separate_expert_names
from engine.models.family import Family, TensorName
from engine.models.llama import LLAMA_NAMES
from engine.models.moe_family import MoeFamily

__all__ = ["MIMO_V2_FLASH"]

_LAYER = "model.layers.{i}"

MIMO_V2_FLASH = Family(
    model_type="mimo_v2_flash",
    names=(
        *(name for name in LLAMA_NAMES if name.kind not in ("q_norm", "k_norm")),
        TensorName(f"{_LAYER}.self_attn.attention_sink_bias", "sinks", form="published"),
        TensorName(f"{_LAYER}.self_attn.sinks", "sinks", form="new"),
        *router_names("mlp.gate"),
        TensorName(f"{_LAYER}.mlp.gate.e_score_correction_bias", "router_correction"),
        *separate_expert_names("mlp"),
        *fused_expert_names(),
    ),
    gguf_names=(),
    defaults={
        "num_key_value_heads": 4,
        "head_dim": 192,
        "v_head_dim": 128,
        "attention_value_scale": 0.707,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.334,
        "rope_parameters": {
            "full_attention": {"rope_theta": 5e6},
            "sliding_attention": {"rope_theta": 1e4},
        },
        "sliding_window": 129,
        "sliding_window_pattern": 6,
        "intermediate_size": 16384,
        "moe_intermediate_size": 2048,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "bos_token_id": 1,
    },
    key_aliases={"layernorm_epsilon": "rms_norm_eps"},
    idle_keys=("attention_chunk_size", "moe_layer_freq"),  # repeat the window and the dense layer
    qkv_bias="attention_bias",
    sinks="windows",
    windows="first_and_pattern",
    past_window="sliding_window_size",
    local_rope=True,
    window_kv_factor=2,
    moe=MoeFamily(
        num_experts=256,
        width="moe_intermediate_size",
        renormalize="norm_topk_prob",
        sparse_layers="after_first",
        lists_layers=True,
        score="sigmoid",
        correction=True,
        scale="routed_scaling_factor",
        has_groups=True,
    ),
)
