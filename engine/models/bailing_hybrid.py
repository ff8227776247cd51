"""Ling 3: Kimi delta attention with bounded gates, gated latent attention, many small experts."""

from __future__ import annotations

from dataclasses import replace

from engine.models.deepseek import DEEPSEEK_V3, latent_names
from engine.models.expert_names import (
    correction_names,
    fused_expert_names,
    router_names,
    separate_expert_names,
    shared_expert_names,
)
from engine.models.family import HF_NAMES, TensorName
from engine.models.kimi_linear import conv_names, kda_names
from engine.models.mixer_family import FULL_ATTENTION, MixerFamily
from engine.models.mtp_family import NEXTN

__all__ = ["BAILING_HYBRID"]

_LAYER = "model.layers.{i}"
_BLOCK = f"{_LAYER}.attention"
_OWN = f"{_LAYER}.self_attn"  # saved by transformers with save_original_format=False

_LATENT = (
    *latent_names(_BLOCK, form="latent"),
    TensorName(f"{_BLOCK}.g_proj.weight", "mla_in", "mla_gate", form="latent"),
    TensorName(f"{_BLOCK}.dense.weight", "mla_out", form="latent"),
    *latent_names(_OWN, form="own_latent"),
    TensorName(f"{_OWN}.g_proj.weight", "mla_in", "mla_gate", form="own_latent"),
    TensorName(f"{_OWN}.o_proj.weight", "mla_out", form="own_latent"),
)
_KDA = (
    *kda_names(_BLOCK, has_latents=False, form="kda"),
    TensorName(f"{_BLOCK}.dense.weight", "delta_out", form="dense"),
    TensorName(f"{_BLOCK}.o_proj.weight", "delta_out", form="o_proj"),
    *conv_names(_BLOCK),
    *kda_names(_OWN, has_latents=False, inner="forget_gate.", form="own_kda"),
    TensorName(f"{_OWN}.o_proj.weight", "delta_out", form="own_kda"),
    TensorName(f"{_OWN}.conv1d.weight", "delta_conv"),
)
_MLP = (
    TensorName(f"{_LAYER}.mlp.gate_proj.weight", "gate_up", "gate"),
    TensorName(f"{_LAYER}.mlp.up_proj.weight", "gate_up", "up"),
    *router_names("mlp.gate"),
    *correction_names("mlp.gate.expert_bias", "mlp.gate.e_score_correction_bias"),
    *separate_expert_names("mlp"),
    *fused_expert_names(),
    *shared_expert_names("mlp.shared_experts"),
)

assert DEEPSEEK_V3.moe is not None

BAILING_HYBRID = replace(
    DEEPSEEK_V3,
    model_type="bailing_hybrid",
    names=(
        TensorName("model.word_embeddings.weight", "embed", form="published"),
        *(name for name in HF_NAMES if name.kind not in ("o", "o_bias")),
        TensorName(f"{_LAYER}.post_attention_layernorm.weight", "mlp_norm"),
        *_LATENT,
        *_KDA,
        *_MLP,
    ),
    defaults={
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "rope_theta": 6e6,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "layer_group_size": 6,
        "kda_safe_gate": True,
        "kda_lower_bound": -5.0,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 1,
        "eos_token_id": 156895,
        "pad_token_id": 156892,
    },
    key_aliases={
        "model_max_length": "max_position_embeddings",
        "moe_renormalize": "norm_topk_prob",
        "score_function": "scoring_func",
        "num_expert_group": "n_group",
        "num_experts_per_token": "num_experts_per_tok",
        "num_shared_experts": "n_shared_experts",
        "num_mtp_layers": "num_nextn_predict_layers",
        "short_conv_kernel_size": "linear_conv_kernel_dim",
        # Of the linear layers, which have no rope here; some files have it.
        "partial_rotary_factor": "linear_partial_rotary_factor",
    },
    idle_keys=("use_qk_norm",),
    qkv_bias=False,
    o_bias=False,
    mla_gate=True,
    mixers=MixerFamily(
        {FULL_ATTENTION: "mla", "linear_attention": "gated_delta"},
        interval="layer_group_size",
        is_kda=True,
    ),
    mtp=replace(NEXTN, final_norm="model.layers.{n}.final_layernorm"),
    moe=replace(DEEPSEEK_V3.moe, num_experts=512, lists_layers=True),
)
