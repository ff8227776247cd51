"""Nemotron-H: layers of one branch, Mamba-2, attention without rope, or an ungated MLP."""

from __future__ import annotations

from engine.models.family import Family, TensorName, linear_names
from engine.models.granitemoehybrid import mamba_names
from engine.models.mixer_family import FULL_ATTENTION, MixerFamily

__all__ = ["NEMOTRON_H"]

_LAYER = "backbone.layers.{i}"
_MIXER = f"{_LAYER}.mixer"

NEMOTRON_H = Family(
    model_type="nemotron_h",
    names=(
        TensorName("backbone.embeddings.weight", "embed"),
        TensorName("backbone.norm_f.weight", "final_norm"),
        TensorName("lm_head.weight", "lm_head"),
        TensorName(f"{_LAYER}.norm.weight", "attn_norm"),
        *linear_names(f"{_MIXER}.q_proj", "qkv", "q"),
        *linear_names(f"{_MIXER}.k_proj", "qkv", "k"),
        *linear_names(f"{_MIXER}.v_proj", "qkv", "v"),
        *linear_names(f"{_MIXER}.o_proj", "o"),
        *linear_names(f"{_MIXER}.up_proj", "up"),
        *linear_names(f"{_MIXER}.down_proj", "down"),
        *mamba_names(_MIXER),
    ),
    gguf_names=(),
    defaults={
        "max_position_embeddings": 4096,
        "layer_norm_epsilon": 1e-5,
        "head_dim": 128,
        "num_key_value_heads": 8,
        "hidden_act": "relu2",
        "mamba_n_heads": 128,
        "mamba_d_head": 64,
        "mamba_n_groups": 8,
        "mamba_d_state": 128,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
    },
    key_aliases={
        "layers_block_type": "layer_types",
        "mlp_hidden_act": "hidden_act",
        "mamba_num_heads": "mamba_n_heads",
        "mamba_head_dim": "mamba_d_head",
        "n_groups": "mamba_n_groups",
        "ssm_state_size": "mamba_d_state",
        "conv_kernel": "mamba_d_conv",
        "expand": "mamba_expand",
        "use_conv_bias": "mamba_conv_bias",
        "use_bias": "mamba_proj_bias",
    },
    eps_key="layer_norm_epsilon",
    gated_mlp=False,
    mlp_bias="mlp_bias",
    rope_layers="none",
    mixers=MixerFamily(
        {
            FULL_ATTENTION: "attention",
            "attention": "attention",
            "linear_attention": "mamba2",
            "mamba": "mamba2",
            "mlp": "mlp",
        },
        pattern="hybrid_override_pattern",
        letters={"M": "linear_attention", "*": FULL_ATTENTION, "-": "mlp"},
        single_branch=True,
    ),
)
