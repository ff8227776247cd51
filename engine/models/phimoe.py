"""Phi-3.5-MoE: mixtral with LayerNorms and biases, two experts of a sparsemixer, and longrope."""

from __future__ import annotations

from engine.models.expert_names import fused_expert_names, router_names, separate_expert_names
from engine.models.family import HF_NORM_BIASES, Family, TensorName
from engine.models.llama import LLAMA_NAMES
from engine.models.moe_family import MoeFamily

__all__ = ["PHIMOE"]

PHIMOE = Family(
    model_type="phimoe",
    names=(
        *LLAMA_NAMES,
        *HF_NORM_BIASES,
        TensorName("lm_head.bias", "lm_head_bias"),
        *router_names("block_sparse_moe.gate", "mlp.router"),
        *separate_expert_names("block_sparse_moe", gate="w1", up="w3", down="w2"),
        *fused_expert_names(),
    ),
    gguf_names=(),
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096 * 32,
        "intermediate_size": 6400,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_experts_per_tok": 2,
        "router_jitter_noise": 0.01,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    lm_head_bias="lm_head_bias",
    layer_norm=True,
    norm_bias=True,
    windows="every_layer",
    rope_mscales=True,
    moe=MoeFamily(num_experts=16, renormalize=False, score="sparsemixer"),
)
