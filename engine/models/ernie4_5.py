"""ERNIE 4.5: Llama with interleaved rope and, in the larger models, experts."""

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
from engine.models.family import GGUF_SPLIT_NAMES, Family, TensorName
from engine.models.llama import LLAMA_NAMES
from engine.models.moe_family import MoeFamily
from engine.models.tensor_layout import Layout

__all__ = ["ERNIE4_5", "ERNIE4_5_MOE"]

ERNIE4_5 = Family(
    model_type="ernie4_5",
    names=LLAMA_NAMES,
    gguf_arch="ernie4_5",
    gguf_interleaved_rope=True,
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    },
    qkv_bias="use_bias",
    o_bias="use_bias",
    mlp_bias="use_bias",
    interleaved_rope=True,
)

ERNIE4_5_MOE = replace(
    ERNIE4_5,
    model_type="ernie4_5_moe",
    names=(
        *LLAMA_NAMES,
        TensorName("lm_head.bias", "lm_head_bias"),
        *router_names("mlp.gate"),
        *correction_names(
            "mlp.moe_statics.e_score_correction_bias",
            "mlp.gate.moe_statics.e_score_correction_bias",
            layout=Layout(transposed=True),
        ),
        *separate_expert_names("mlp"),
        *fused_expert_names(),
        *shared_expert_names("mlp.shared_experts"),
    ),
    gguf_names=(*GGUF_SPLIT_NAMES, *GGUF_EXPERT_NAMES, *GGUF_SHARED_EXPERT_NAMES),
    gguf_arch="ernie4_5-moe",
    defaults={
        **{key: value for key, value in ERNIE4_5.defaults.items() if key != "head_dim"},
        "num_key_value_heads": 4,
        "moe_intermediate_size": 1536,
        "num_experts_per_tok": 6,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
    },
    key_aliases={"moe_k": "num_experts_per_tok", "moe_num_experts": "num_experts"},
    lm_head_bias="use_bias",
    moe=MoeFamily(
        num_experts=64,
        width="moe_intermediate_size",
        sparse_layers="interval",
        correction=True,
        shared_count="moe_num_shared_experts",
        shared_bias="use_bias",
    ),
)
"""The same with experts: softmax routing with a correction, shared experts."""
