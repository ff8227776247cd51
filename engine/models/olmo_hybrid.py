"""OLMo hybrid: gated delta nets with norms before, OLMo 2's attention with norms after."""

from __future__ import annotations

from dataclasses import replace

from engine.models.family import TensorName
from engine.models.mixer_family import FULL_ATTENTION, MixerFamily
from engine.models.olmo2 import OLMO2

__all__ = ["OLMO_HYBRID"]

_LAYER = "model.layers.{i}"
_DELTA = f"{_LAYER}.linear_attn"
_CHANNELS = "delta_q+delta_k+delta_v"

# Published names; names as of other families; and those that transformers saves for attention.
_NORMS = (
    TensorName(f"{_LAYER}.attention_layer_norm.weight", "attn_norm", form="own"),
    TensorName(f"{_LAYER}.input_layernorm.weight", "attn_norm"),
    TensorName(f"{_LAYER}.feedforward_layer_norm.weight", "mlp_norm", form="own"),
    TensorName(f"{_LAYER}.post_attention_layernorm.weight", "mlp_norm", form="alike"),
    TensorName(f"{_LAYER}.feedforward_layer_norm.weight", "post_attn_norm", form="saved"),
)
# transformers joins the convolutions of q, k and v, and saves the whole in equal thirds.
_CONVOLUTIONS = (
    *(
        TensorName(f"{_DELTA}.{part}_conv1d.weight", "delta_conv", f"delta_{part}", form="apart")
        for part in "qkv"
    ),
    *(
        TensorName(
            f"{_DELTA}.{part}_conv1d.weight", "delta_conv", _CHANNELS, form="thirds", third=third
        )
        for third, part in enumerate("qkv")
    ),
    TensorName(f"{_DELTA}.conv1d.weight", "delta_conv"),
)

OLMO_HYBRID = replace(
    OLMO2,
    model_type="olmo_hybrid",
    names=(
        *(name for name in OLMO2.names if "input_layernorm" not in name.checkpoint),
        *_NORMS,
        *_CONVOLUTIONS,
        TensorName(f"{_DELTA}.q_proj.weight", "delta_in", "delta_q"),
        TensorName(f"{_DELTA}.k_proj.weight", "delta_in", "delta_k"),
        TensorName(f"{_DELTA}.v_proj.weight", "delta_in", "delta_v"),
        TensorName(f"{_DELTA}.g_proj.weight", "delta_in", "delta_z"),
        TensorName(f"{_DELTA}.b_proj.weight", "delta_in", "delta_b"),
        TensorName(f"{_DELTA}.a_proj.weight", "delta_in", "delta_a"),
        TensorName(f"{_DELTA}.A_log", "delta_decay"),
        TensorName(f"{_DELTA}.dt_bias", "delta_dt"),
        TensorName(f"{_DELTA}.o_norm.weight", "delta_norm"),
        TensorName(f"{_DELTA}.o_proj.weight", "delta_out"),
    ),
    gguf_names=(),
    gguf_arch="",
    defaults={
        "max_position_embeddings": 65536,
        "rms_norm_eps": 1e-6,
        "intermediate_size": 11008,
        "rope_theta": 10000.0,  # null: no rope
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_allow_neg_eigval": True,
        "eos_token_id": 100257,
        "pad_token_id": 100277,
    },
    pre_norms=True,
    norms_by_kind=True,
    rope_layers="rope_theta",
    mixers=MixerFamily(
        {FULL_ATTENTION: "attention", "linear_attention": "gated_delta"},
        interval="full_attention_interval",
        attends_last=True,
        norm_eps=1e-5,
    ),
)
