"""Llama 4, text: chunked attention, layers without rope, one expert beside a shared one."""

from __future__ import annotations

from engine.models.expert_names import (
    fused_expert_names,
    router_names,
    separate_expert_names,
    shared_expert_names,
)
from engine.models.family import HF_LAYER_NAMES, HF_NAMES, Family, TensorName
from engine.models.moe_family import MoeFamily
from engine.models.tensor_layout import Layout

__all__ = ["LLAMA4_TEXT"]

_BLOCK = "feed_forward"
_LAYER = "model.layers.{i}"

LLAMA4_TEXT = Family(
    model_type="llama4_text",
    names=(
        *(name for name in (*HF_NAMES, *HF_LAYER_NAMES) if ".mlp." not in name.checkpoint),
        TensorName(f"{_LAYER}.post_attention_layernorm.weight", "mlp_norm"),
        TensorName(f"{_LAYER}.{_BLOCK}.gate_proj.weight", "gate_up", "gate"),
        TensorName(f"{_LAYER}.{_BLOCK}.up_proj.weight", "gate_up", "up"),
        TensorName(f"{_LAYER}.{_BLOCK}.down_proj.weight", "down"),
        *router_names(f"{_BLOCK}.router"),
        *shared_expert_names(f"{_BLOCK}.shared_expert"),
        *fused_expert_names(_BLOCK, layout=Layout(transposed=True)),
        *separate_expert_names(_BLOCK),  # quantized ones
    ),
    gguf_names=(),
    defaults={
        "vocab_size": 202048,
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "num_experts_per_tok": 1,
        "no_rope_layer_interval": 4,
        "attention_chunk_size": 8192,
        "use_qk_norm": True,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm="use_qk_norm",
    bare_qk_norm=True,
    chunks=True,
    rope_layers="no_rope_layers",
    scales_unrotated_q=True,
    interleaved_rope=True,
    mlp_width="intermediate_size_mlp",
    moe=MoeFamily(
        num_experts=16,
        sparse_layers="moe_layers",
        scales_input=True,
        shared_width="intermediate_size",
    ),
)
