"""Ring-linear 2 and Ling 2.5: lightning attention beside grouped-query or latent attention."""

from __future__ import annotations

from dataclasses import replace

from engine.models.bailing_hybrid import BAILING_HYBRID
from engine.models.deepseek import latent_names
from engine.models.expert_names import (
    correction_names,
    router_names,
    separate_expert_names,
    shared_expert_names,
)
from engine.models.family import HF_NAMES, TensorName
from engine.models.mixer_family import FULL_ATTENTION, MixerFamily

__all__ = ["BAILING_MOE_LINEAR", "BAILING_MOE_V2_5"]

_LAYER = "model.layers.{i}"
_BLOCK = f"{_LAYER}.attention"

_NAMES = (
    TensorName("model.word_embeddings.weight", "embed"),
    *(name for name in HF_NAMES if name.kind not in ("embed", "o", "o_bias")),
    TensorName(f"{_LAYER}.post_attention_layernorm.weight", "mlp_norm"),
    TensorName(f"{_LAYER}.mlp.gate_proj.weight", "gate_up", "gate"),
    TensorName(f"{_LAYER}.mlp.up_proj.weight", "gate_up", "up"),
    *router_names("mlp.gate"),
    *correction_names("mlp.gate.expert_bias"),
    *separate_expert_names("mlp"),
    *shared_expert_names("mlp.shared_experts"),
)
_FORM = "lightning"
_LIGHTNING = (
    TensorName(
        f"{_BLOCK}.query_key_value.weight",
        "lightning_in",
        "lightning_q+lightning_k+lightning_v",
        form=_FORM,
    ),
    TensorName(f"{_BLOCK}.g_proj.weight", "lightning_in", "lightning_g", form=_FORM),
    TensorName(f"{_BLOCK}.query_layernorm.weight", "lightning_q_norm", form=_FORM),
    TensorName(f"{_BLOCK}.key_layernorm.weight", "lightning_k_norm", form=_FORM),
    TensorName(f"{_BLOCK}.g_norm.weight", "lightning_norm", form=_FORM),
    TensorName(f"{_BLOCK}.dense.weight", "lightning_out", form=_FORM),
)

assert BAILING_HYBRID.moe is not None

BAILING_MOE_V2_5 = replace(
    BAILING_HYBRID,
    model_type="bailing_moe_v2_5",
    names=(
        *_NAMES,
        *latent_names(_BLOCK),
        TensorName(f"{_BLOCK}.dense.weight", "mla_out"),
        *_LIGHTNING,
    ),
    defaults={
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 600000.0,
        "head_dim": 128,
        "linear_partial_rotary_factor": 0.5,
        "group_norm_size": 4,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "layer_group_size": 5,
        "intermediate_size": 5120,
        "moe_intermediate_size": 512,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "eos_token_id": 156892,
        "pad_token_id": 156892,
    },
    idle_keys=("use_qk_norm",),  # set even if the model has no layer that reads it
    mla_gate=False,
    mixers=MixerFamily(
        {FULL_ATTENTION: "mla", "linear_attention": "lightning"},
        interval="layer_group_size",
        attends_in_rest=True,
    ),
    moe=replace(BAILING_HYBRID.moe, num_experts=256, lists_layers=False),
)

_GQA = "attention"

BAILING_MOE_LINEAR = replace(
    BAILING_MOE_V2_5,
    model_type="bailing_moe_linear",
    names=(
        *_NAMES,
        TensorName(f"{_BLOCK}.query_key_value.weight", "qkv", form=_GQA),
        TensorName(f"{_BLOCK}.query_layernorm.weight", "q_norm", form=_GQA),
        TensorName(f"{_BLOCK}.key_layernorm.weight", "k_norm", form=_GQA),
        TensorName(f"{_BLOCK}.dense.weight", "o", form=_GQA),
        *_LIGHTNING,
    ),
    defaults={
        **{
            key: value
            for key, value in BAILING_MOE_V2_5.defaults.items()
            if not key.startswith(("qk_", "kv_", "v_head", "linear_"))
        },
        "num_key_value_heads": 4,
        "partial_rotary_factor": 0.5,
        "use_qk_norm": True,
    },
    key_aliases={
        key: value
        for key, value in BAILING_MOE_V2_5.key_aliases.items()
        if key != "partial_rotary_factor"
    },
    interleaved_rope=False,
    mla=False,
    qk_norm="use_qk_norm",
    extra_layers="num_nextn_predict_layers",
    mtp=None,
    mixers=MixerFamily(
        {FULL_ATTENTION: "attention", "linear_attention": "lightning"},
        interval="layer_group_size",
        attends_in_rest=True,
    ),
)
