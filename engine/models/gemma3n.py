"""Gemma 3n, text only: several residual streams, per-layer inputs, shared layers, sparse MLPs.

See `engine.layers.altup` for the streams.
"""

from __future__ import annotations

from engine.models.family import Family, TensorName
from engine.models.gemma3 import GEMMA3
from engine.models.gemma4 import PER_LAYER_NAMES

__all__ = ["GEMMA3N"]

_LAYER = "model.layers.{i}."

GEMMA3N = Family(
    model_type="gemma3n_text",
    names=(
        *GEMMA3.names,
        *PER_LAYER_NAMES,
        TensorName(f"{_LAYER}altup.modality_router.weight", "altup_router"),
        TensorName(f"{_LAYER}altup.router_norm.weight", "altup_router_norm"),
        TensorName(f"{_LAYER}altup.prediction_coefs.weight", "altup_prediction"),
        TensorName(f"{_LAYER}altup.correction_coefs.weight", "altup_correction"),
        TensorName(f"{_LAYER}altup.correct_output_scale", "altup_scale"),
        TensorName(f"{_LAYER}laurel.linear_left.weight", "laurel_left"),
        TensorName(f"{_LAYER}laurel.linear_right.weight", "laurel_right"),
        TensorName(f"{_LAYER}laurel.post_laurel_norm.weight", "laurel_norm"),
        *(
            TensorName(f"model.altup_{name}.{stream}.weight", f"altup_{end}_{stream + 1}")
            for name, end in (("projections", "entry"), ("unembed_projections", "exit"))
            for stream in range(3)
        ),
    ),
    gguf_names=(),
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 256,
        "intermediate_size": 16384,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "final_logit_softcapping": 30.0,
        "sliding_window": 512,
        "sliding_window_pattern": 5,
        "num_kv_shared_layers": 15,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
        "altup_num_inputs": 4,
        "laurel_rank": 64,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
    },
    idle_keys=("query_pre_attn_scalar",),  # a left-over in published files
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm=True,
    v_norm=True,
    post_norms=True,
    windows="pattern",
    scale_embedding=True,
    attn_scale=1.0,
    local_rope=True,
    max_position_is_scaled=True,
    layers_differ=True,
)
