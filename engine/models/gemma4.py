"""Gemma 4, text only: per-layer inputs, shared keys and values, wide heads, experts beside the MLP.

Layers with full attention have heads of another width, and may use their keys as values.
"""

from __future__ import annotations

from dataclasses import replace

from engine.models.expert_names import fused_expert_names
from engine.models.family import Family, TensorName
from engine.models.gemma3 import GEMMA3
from engine.models.moe_family import MoeFamily

__all__ = ["GEMMA4", "GEMMA4_UNIFIED", "PER_LAYER_NAMES"]

_LAYER = "model.layers.{i}."

PER_LAYER_NAMES: tuple[TensorName, ...] = (
    TensorName("model.embed_tokens_per_layer.weight", "embed_per_layer"),
    TensorName("model.per_layer_model_projection.weight", "per_layer_projection"),
    TensorName("model.per_layer_projection_norm.weight", "per_layer_norm"),
    TensorName(f"{_LAYER}per_layer_input_gate.weight", "per_layer_gate"),
    TensorName(f"{_LAYER}per_layer_projection.weight", "per_layer_output"),
    TensorName(f"{_LAYER}post_per_layer_input_norm.weight", "per_layer_output_norm"),
)
"""Names of the second embedding, and of what layers do with it."""

GEMMA4 = Family(
    model_type="gemma4_text",
    names=(
        *GEMMA3.names,
        *PER_LAYER_NAMES,
        TensorName(f"{_LAYER}layer_scalar", "layer_scale"),
        TensorName(f"{_LAYER}router.proj.weight", "router"),
        TensorName(f"{_LAYER}router.scale", "router_norm"),
        TensorName(f"{_LAYER}router.per_expert_scale", "router_scale"),
        TensorName(f"{_LAYER}pre_feedforward_layernorm_2.weight", "moe_norm"),
        TensorName(f"{_LAYER}post_feedforward_layernorm_1.weight", "post_dense_norm"),
        TensorName(f"{_LAYER}post_feedforward_layernorm_2.weight", "post_moe_norm"),
        *fused_expert_names(""),
    ),
    gguf_names=(),
    defaults={
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1e6,
            },
        },
        "final_logit_softcapping": None,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
    },
    key_aliases={"top_k_experts": "num_experts_per_tok"},
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm=True,
    v_norm=True,
    post_norms=True,
    windows="pattern",
    last_is_full=True,
    scale_embedding=True,
    attn_scale=1.0,
    local_rope=True,
    max_position_is_scaled=True,
    layer_scale=True,
    layers_differ=True,
    moe=MoeFamily(
        num_experts=128,
        enabled="enable_moe_block",
        width="moe_intermediate_size",
        activation="geglu",
        beside_mlp=True,
    ),
)

GEMMA4_UNIFIED = replace(
    GEMMA4,
    model_type="gemma4_unified_text",
    names=(*GEMMA3.names, TensorName(f"{_LAYER}layer_scalar", "layer_scale")),
    defaults={
        **{key: value for key, value in GEMMA4.defaults.items() if "_per_layer_" not in key},
        "max_position_embeddings": 262144,
        "sliding_window": 1024,
    },
    key_aliases={},
    moe=None,
)
"""The same without per-layer inputs and experts."""
