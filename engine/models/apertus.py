"""Apertus: an MLP without a gate, with xIELU; norms of q and k."""

from __future__ import annotations

from engine.models.family import HF_NAMES, HF_UNGATED_LAYER_NAMES, Family, TensorName

__all__ = ["APERTUS"]

_LAYER = "model.layers.{i}"

APERTUS = Family(
    model_type="apertus",
    names=(
        *(name for name in HF_NAMES if name.kind != "attn_norm"),
        *HF_UNGATED_LAYER_NAMES,
        TensorName(f"{_LAYER}.attention_layernorm.weight", "attn_norm"),
        TensorName(f"{_LAYER}.feedforward_layernorm.weight", "mlp_norm"),
        TensorName(f"{_LAYER}.mlp.act_fn.alpha_p", "xielu_alpha_p"),
        TensorName(f"{_LAYER}.mlp.act_fn.alpha_n", "xielu_alpha_n"),
        TensorName(f"{_LAYER}.mlp.act_fn.beta", "xielu_beta"),
        TensorName(f"{_LAYER}.mlp.act_fn.eps", "xielu_eps"),
    ),
    gguf_names=(),
    defaults={
        "max_position_embeddings": 65536,
        "rms_norm_eps": 1e-5,
        "hidden_act": "xielu",
        "rope_theta": 12e6,
        "rope_parameters": {  # also beside a rope_theta, which it then overrules
            "rope_type": "llama3",
            "rope_theta": 12e6,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 3,
    },
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    qk_norm=True,
    gated_mlp=False,
)
