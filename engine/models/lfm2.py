"""LFM2: gated short convolutions, and attention in some layers; dense or with experts."""

from __future__ import annotations

from dataclasses import replace

from engine.models.expert_names import fused_expert_names, router_names, separate_expert_names
from engine.models.family import HF_ATTENTION_NAMES, Family, TensorName, linear_names
from engine.models.mixer_family import FULL_ATTENTION, MixerFamily
from engine.models.moe_family import MoeFamily

__all__ = ["LFM2", "LFM2_MOE", "LFM3"]

_LAYER = "model.layers.{i}"
_FFN = f"{_LAYER}.feed_forward"

_NAMES: tuple[TensorName, ...] = (
    TensorName("model.embed_tokens.weight", "embed"),
    TensorName("model.embedding_norm.weight", "final_norm"),
    TensorName("lm_head.weight", "lm_head"),
    TensorName(f"{_LAYER}.operator_norm.weight", "attn_norm"),
    TensorName(f"{_LAYER}.ffn_norm.weight", "mlp_norm"),
    *linear_names(f"{_LAYER}.conv.in_proj", "conv_in"),
    *linear_names(f"{_LAYER}.conv.conv", "conv_taps"),
    *linear_names(f"{_LAYER}.conv.out_proj", "conv_out"),
    TensorName(f"{_FFN}.w1.weight", "gate_up", "gate"),
    TensorName(f"{_FFN}.w3.weight", "gate_up", "up"),
    TensorName(f"{_FFN}.w2.weight", "down"),
)
"""Names outside attention."""

LFM2 = Family(
    model_type="lfm2",
    names=(
        *_NAMES,
        TensorName(f"{_LAYER}.self_attn.q_proj.weight", "qkv", "q"),
        TensorName(f"{_LAYER}.self_attn.k_proj.weight", "qkv", "k"),
        TensorName(f"{_LAYER}.self_attn.v_proj.weight", "qkv", "v"),
        TensorName(f"{_LAYER}.self_attn.q_layernorm.weight", "q_norm"),
        TensorName(f"{_LAYER}.self_attn.k_layernorm.weight", "k_norm"),
        TensorName(f"{_LAYER}.self_attn.out_proj.weight", "o"),
    ),
    gguf_names=(),
    defaults={
        "max_position_embeddings": 128000,
        "norm_eps": 1e-5,
        "intermediate_size": 12288,
        "num_key_value_heads": 8,
        "conv_L_cache": 3,
        "block_multiple_of": 256,
        "tie_word_embeddings": True,
        "rope_theta": 1000000.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    },
    key_aliases={"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"},
    eps_key="norm_eps",
    qk_norm=True,
    mixers=MixerFamily(
        {FULL_ATTENTION: "attention", "conv": "short_conv"}, full_layers="full_attn_idxs"
    ),
    adjusts_width=True,
)

LFM2_MOE = replace(
    LFM2,
    model_type="lfm2_moe",
    names=(
        *LFM2.names,
        *router_names("feed_forward.gate"),
        TensorName(f"{_FFN}.expert_bias", "router_correction"),
        *separate_expert_names("feed_forward", gate="w1", up="w3", down="w2"),
        *fused_expert_names("feed_forward"),
    ),
    defaults={
        **LFM2.defaults,
        "intermediate_size": 7168,
        "moe_intermediate_size": 1792,
        "first_k_dense_replace": 2,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "use_expert_bias": True,
    },
    key_aliases={
        "tie_embedding": "tie_word_embeddings",
        "num_dense_layers": "first_k_dense_replace",
    },
    adjusts_width=False,
    moe=MoeFamily(
        num_experts=32,
        width="moe_intermediate_size",
        renormalize="norm_topk_prob",
        sparse_layers="after_first",
        score="sigmoid",
        correction="use_expert_bias",
        scale="routed_scaling_factor",
    ),
)

LFM3 = replace(
    LFM2,
    model_type="lfm3",
    names=(
        *_NAMES,
        *HF_ATTENTION_NAMES,
        *linear_names(f"{_LAYER}.self_attn.o_proj", "o"),
        TensorName(f"{_LAYER}.self_attn.gate_proj.weight", "qkv", "attn_gate"),
        TensorName(f"{_LAYER}.post_operator_norm.weight", "post_attn_norm"),
        TensorName(f"{_LAYER}.post_ffn_norm.weight", "post_mlp_norm"),
    ),
    defaults={
        "max_position_embeddings": 128000,
        "norm_eps": 1e-5,
        "intermediate_size": 7680,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "conv_L_cache": 7,
        "sliding_window": 256,
        "use_sandwich_norm": True,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "sliding_attention": {"rope_theta": 1e4},
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 1e6,
                "partial_rotary_factor": 0.5,
            },
        },
        "bos_token_id": 124894,
        "eos_token_id": 124900,
        "pad_token_id": 124893,
    },
    key_aliases={"rms_norm_eps": "norm_eps"},
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    post_norms="use_sandwich_norm",
    attn_gate="sigmoid_heads",
    attn_gate_key="use_attention_gate",
    windows="layer_types",
    local_rope=True,
    mixers=MixerFamily(
        {FULL_ATTENTION: "attention", "sliding_attention": "attention", "conv": "short_conv"}
    ),
    adjusts_width=False,
)
"""LFM3: windows in some layers, a gate per head of attention, norms of outputs."""
