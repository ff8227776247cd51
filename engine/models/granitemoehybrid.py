"""Granite 4: granite with Mamba-2 layers and, in most sizes, experts beside a shared one."""

from __future__ import annotations

from engine.models.expert_names import fused_expert_names, router_names
from engine.models.family import Family, TensorName, linear_names
from engine.models.granite import GRANITE
from engine.models.llama import LLAMA_NAMES
from engine.models.mixer_family import FULL_ATTENTION, MixerFamily
from engine.models.moe_family import MoeFamily

__all__ = ["GRANITEMOEHYBRID", "mamba_names"]

_LAYER = "model.layers.{i}"
_BLOCK = "block_sparse_moe"


def mamba_names(block: str) -> tuple[TensorName, ...]:
    """Name the tensors of a Mamba-2 layer."""
    return (
        *linear_names(f"{block}.in_proj", "mamba_in"),
        *linear_names(f"{block}.conv1d", "mamba_conv"),
        TensorName(f"{block}.A_log", "mamba_decay"),
        TensorName(f"{block}.D", "mamba_skip"),
        TensorName(f"{block}.dt_bias", "mamba_step"),
        TensorName(f"{block}.norm.weight", "mamba_norm"),
        *linear_names(f"{block}.out_proj", "mamba_out"),
    )


GRANITEMOEHYBRID = Family(
    model_type="granitemoehybrid",
    names=(
        *(name for name in LLAMA_NAMES if ".mlp." not in name.checkpoint),
        *mamba_names(f"{_LAYER}.mamba"),
        *router_names(f"{_BLOCK}.router.layer", f"{_BLOCK}.router"),
        *fused_expert_names(
            _BLOCK, "input_linear.weight", "output_linear.weight", form="published"
        ),
        *fused_expert_names(_BLOCK),
        # Without experts, the shared one is the MLP.
        TensorName(f"{_LAYER}.shared_mlp.input_linear.weight", "shared_gate_up"),
        TensorName(f"{_LAYER}.shared_mlp.output_linear.weight", "shared_down"),
        TensorName(f"{_LAYER}.shared_mlp.input_linear.weight", "gate_up", form="dense"),
        TensorName(f"{_LAYER}.shared_mlp.output_linear.weight", "down", form="dense"),
    ),
    gguf_names=(),
    defaults={
        **GRANITE.defaults,
        "intermediate_size": 11008,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 1024,
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_head": "auto",
        "mamba_d_conv": 4,
        "mamba_expand": 2,
    },
    key_aliases={"layers_block_type": "layer_types"},
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    multipliers=True,
    rope_layers="position_embedding_type",
    mixers=MixerFamily(
        {
            FULL_ATTENTION: "attention",
            "attention": "attention",
            "linear_attention": "mamba2",
            "mamba": "mamba2",
        }
    ),
    moe=MoeFamily(
        num_experts=8,
        dense_width="shared_intermediate_size",
        shared_width="shared_intermediate_size",
    ),
)
