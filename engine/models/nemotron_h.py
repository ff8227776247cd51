"""Nemotron-H and 3: layers of one branch, Mamba-2, attention without rope, an MLP, or experts."""

from __future__ import annotations

from engine.models.family import Family, TensorName, linear_names
from engine.models.granitemoehybrid import mamba_names
from engine.models.mixer_family import FULL_ATTENTION, MixerFamily
from engine.models.moe_family import MoeFamily

__all__ = ["NEMOTRON_H"]

_LAYER = "backbone.layers.{i}"
_MIXER = f"{_LAYER}.mixer"
_EXPERT = f"{_MIXER}.experts.{{e}}"

_NAMES = (
    TensorName("backbone.embeddings.weight", "embed"),
    TensorName("backbone.norm_f.weight", "final_norm"),
    TensorName(f"{_LAYER}.norm.weight", "attn_norm"),
    *linear_names(f"{_MIXER}.q_proj", "qkv", "q"),
    *linear_names(f"{_MIXER}.k_proj", "qkv", "k"),
    *linear_names(f"{_MIXER}.v_proj", "qkv", "v"),
    *linear_names(f"{_MIXER}.o_proj", "o"),
    *linear_names(f"{_MIXER}.up_proj", "up"),
    *linear_names(f"{_MIXER}.down_proj", "down"),
    *mamba_names(_MIXER),
    TensorName(f"{_MIXER}.gate.weight", "router"),
    TensorName(f"{_MIXER}.gate.e_score_correction_bias", "router_correction"),
    TensorName(f"{_EXPERT}.up_proj.weight", "experts_gate_up", "expert_up"),
    TensorName(f"{_EXPERT}.down_proj.weight", "experts_down"),
    *linear_names(f"{_MIXER}.shared_experts.up_proj", "shared_gate_up", "shared_up"),
    *linear_names(f"{_MIXER}.shared_experts.down_proj", "shared_down"),
    *linear_names(f"{_MIXER}.fc1_latent_proj", "moe_latent_in"),
    *linear_names(f"{_MIXER}.fc2_latent_proj", "moe_latent_out"),
)


def _in_new_file(name: TensorName) -> TensorName:
    checkpoint = name.checkpoint.replace("backbone.", "model.", 1)
    return name._replace(checkpoint=checkpoint, form="new")


NEMOTRON_H = Family(
    model_type="nemotron_h",
    names=(
        TensorName("lm_head.weight", "lm_head"),
        *_NAMES,
        # As transformers 5 writes them with ``save_original_format=False``.
        *(_in_new_file(name) for name in _NAMES if "{e}" not in name.checkpoint),
        TensorName("model.layers.{i}.mixer.experts.up_proj", "experts_gate_up", form="new"),
        TensorName("model.layers.{i}.mixer.experts.down_proj", "experts_down", form="new"),
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
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
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
        "mamba_dt_limit": "time_step_limit",
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
            "moe": "moe",
        },
        pattern="hybrid_override_pattern",
        letters={"M": "linear_attention", "*": FULL_ATTENTION, "-": "mlp", "E": "moe"},
        single_branch=True,
        conv_activation="mamba_hidden_act",
    ),
    moe=MoeFamily(
        num_experts=8,
        width="moe_intermediate_size",
        renormalize="norm_topk_prob",
        sparse_layers="layer_types",
        score="sigmoid",
        correction=True,
        scale="routed_scaling_factor",
        has_groups=True,
        shared_width="moe_shared_expert_intermediate_size",
        shared_bias="mlp_bias",
        activation="relu2",
        latent_width="moe_latent_size",
        latent_bias="mlp_bias",
    ),
)
