"""Kimi Linear: Kimi delta attention, and latent attention without rope in every fourth layer."""

from __future__ import annotations

from dataclasses import replace

from engine.models.deepseek import DEEPSEEK_V3, MLA_NAMES
from engine.models.expert_names import (
    correction_names,
    fused_expert_names,
    router_names,
    separate_expert_names,
    shared_expert_names,
)
from engine.models.family import TensorName
from engine.models.mixer_family import FULL_ATTENTION, MixerFamily

__all__ = ["KIMI_LINEAR", "conv_names", "kda_names"]

_LAYER = "model.layers.{i}"
_BLOCK = "block_sparse_moe"

assert DEEPSEEK_V3.moe is not None


def kda_names(
    block: str, *, has_latents: bool, inner: str = "", form: str = ""
) -> tuple[TensorName, ...]:
    """Name the tensors of Kimi delta attention in `block`, without its output projection.

    `has_latents`: the gates have two projections. `inner`: prefix of the decays' tensors. `form`:
    see `TensorName`.
    """
    gates = {f"{inner}f_proj": "delta_a", "g_proj": "delta_z"}
    if has_latents:
        gates = {f"{inner}f_a_proj": "delta_a_latent", "g_a_proj": "delta_z_latent"}
    rows = {**{f"{one}_proj": f"delta_{one}" for one in "qkvb"}, **gates}
    parts = (
        TensorName(f"{block}.{name}.weight", "delta_in", part, form=form)
        for name, part in rows.items()
    )
    latents = (
        TensorName(f"{block}.{inner}f_b_proj.weight", "delta_a_up", form=form),
        TensorName(f"{block}.g_b_proj.weight", "delta_z_up", form=form),
    )
    return (
        *parts,
        *(latents if has_latents else ()),
        TensorName(f"{block}.{inner}A_log", "delta_decay", form=form),
        TensorName(f"{block}.{inner}dt_bias", "delta_dt", form=form),
        TensorName(f"{block}.o_norm.weight", "delta_norm", form=form),
    )


def conv_names(block: str) -> tuple[TensorName, ...]:
    """Name the convolutions of q, k and v in `block`, each for itself."""
    return tuple(
        TensorName(f"{block}.{part}_conv1d.weight", "delta_conv", f"delta_{part}", form="apart")
        for part in "qkv"
    )


# Published names, and those that transformers saves with save_original_format=False.
_ATTENTION = f"{_LAYER}.self_attn"
_KDA = (
    *kda_names(_ATTENTION, has_latents=True, form="kda"),
    *kda_names(_ATTENTION, has_latents=True, inner="forget_gate.", form="own"),
    TensorName(f"{_ATTENTION}.o_proj.weight", "delta_out", form="kda"),
    *conv_names(_ATTENTION),
    TensorName(f"{_ATTENTION}.conv1d.weight", "delta_conv"),
)
# transformers saves the dense layers' MLP where the others have experts.
_DENSE = (
    TensorName(f"{_LAYER}.{_BLOCK}.gate_proj.weight", "gate_up", "gate", form="saved"),
    TensorName(f"{_LAYER}.{_BLOCK}.up_proj.weight", "gate_up", "up", form="saved"),
    TensorName(f"{_LAYER}.{_BLOCK}.down_proj.weight", "down", form="saved"),
)

KIMI_LINEAR = replace(
    DEEPSEEK_V3,
    model_type="kimi_linear",
    names=(
        *MLA_NAMES,
        *_KDA,
        *_DENSE,
        *router_names(f"{_BLOCK}.gate", "mlp.gate"),
        *correction_names(
            f"{_BLOCK}.gate.e_score_correction_bias", "mlp.gate.e_score_correction_bias"
        ),
        *separate_expert_names(_BLOCK, gate="w1", up="w3", down="w2"),
        *fused_expert_names(),
        *shared_expert_names(f"{_BLOCK}.shared_experts"),
        *shared_expert_names("mlp.shared_experts", form="own"),
    ),
    defaults={
        "max_position_embeddings": 1048576,
        "rms_norm_eps": 1e-5,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "linear_num_heads": 32,
        "linear_head_dim": 128,
        "intermediate_size": 9216,
        "moe_intermediate_size": 1024,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.446,
        "bos_token_id": 163584,
        "eos_token_id": 163586,
        "pad_token_id": 163839,
    },
    key_aliases={
        "model_max_length": "max_position_embeddings",
        "moe_renormalize": "norm_topk_prob",
        "moe_router_activation_func": "scoring_func",
        "num_expert_group": "n_group",
        "num_experts_per_token": "num_experts_per_tok",
        "num_shared_experts": "n_shared_experts",
    },
    interleaved_rope=False,
    rope_layers="none",
    mixers=MixerFamily(
        {FULL_ATTENTION: "mla", "linear_attention": "gated_delta"},
        is_kda=True,
        has_gate_latents=True,
        config_key="linear_attn_config",
    ),
    extra_layers="",
    mtp=None,
    moe=replace(DEEPSEEK_V3.moe, lists_layers=True),
)
