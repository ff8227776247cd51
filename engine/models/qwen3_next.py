"""Qwen3-Next: gated delta net layers, gated attention in every fourth layer, experts."""

from __future__ import annotations

from engine.models.expert_names import (
    fused_expert_names,
    router_names,
    separate_expert_names,
    shared_expert_names,
)
from engine.models.family import Family, TensorName
from engine.models.llama import LLAMA_NAMES
from engine.models.mixer_family import FULL_ATTENTION, MixerFamily
from engine.models.moe_family import MoeFamily
from engine.models.mtp_family import MtpFamily

__all__ = ["DELTA_NAMES", "GATED_ATTENTION_NAMES", "QWEN3_NEXT", "QWEN3_NEXT_MLP_NAMES"]

GATED_ATTENTION_NAMES: tuple[TensorName, ...] = tuple(
    name._replace(part="q|attn_gate") if name.part == "q" else name for name in LLAMA_NAMES
)
"""Llama's names; the rows of q_proj are a query and a gate for each head."""

_DELTA = "model.layers.{i}.linear_attn"

DELTA_NAMES: tuple[TensorName, ...] = (
    TensorName(f"{_DELTA}.conv1d.weight", "delta_conv"),
    TensorName(f"{_DELTA}.A_log", "delta_decay"),
    TensorName(f"{_DELTA}.dt_bias", "delta_dt"),
    TensorName(f"{_DELTA}.norm.weight", "delta_norm"),
    TensorName(f"{_DELTA}.out_proj.weight", "delta_out"),
)
"""Names in a gated delta net, without those of its input projections."""

QWEN3_NEXT_MLP_NAMES: tuple[TensorName, ...] = (
    *router_names("mlp.gate"),
    *separate_expert_names("mlp"),
    *fused_expert_names(),
    *shared_expert_names("mlp.shared_expert", gate="mlp.shared_expert_gate"),
)
"""Names of the experts."""

QWEN3_NEXT = Family(
    model_type="qwen3_next",
    names=(
        *GATED_ATTENTION_NAMES,
        TensorName(f"{_DELTA}.in_proj_qkvz.weight", "delta_in", "delta_q|delta_k|delta_v|delta_z"),
        TensorName(f"{_DELTA}.in_proj_ba.weight", "delta_in", "delta_b|delta_a"),
        *DELTA_NAMES,
        *QWEN3_NEXT_MLP_NAMES,
    ),
    gguf_names=(),
    defaults={
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "intermediate_size": 5632,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
    },
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm=True,
    norm_weight_offset=1.0,
    attn_gate="sigmoid",
    mixers=MixerFamily(
        {FULL_ATTENTION: "attention", "linear_attention": "gated_delta"},
        interval="full_attention_interval",
    ),
    mtp=MtpFamily(
        layer="mtp.layers.0.",
        proj="mtp.fc",
        embed_norm="mtp.pre_fc_norm_embedding",
        hidden_norm="mtp.pre_fc_norm_hidden",
        final_norm="mtp.norm",
    ),
    moe=MoeFamily(
        num_experts=512,
        width="moe_intermediate_size",
        renormalize="norm_topk_prob",
        sparse_layers="steps",
        shared_width="shared_expert_intermediate_size",
        shared_gate=True,
    ),
)
