"""Phi-1, 1.5 and 2: parallel blocks, LayerNorm, an MLP without a gate, biases everywhere."""

from __future__ import annotations

from engine.models.family import HF_LAYER_NAMES, Family, TensorName, linear_names

__all__ = ["PHI"]

_LAYER = "model.layers.{i}"

PHI = Family(
    model_type="phi",
    names=(
        TensorName("model.embed_tokens.weight", "embed"),
        TensorName("model.final_layernorm.weight", "final_norm"),
        TensorName("model.final_layernorm.bias", "final_norm_bias"),
        TensorName("lm_head.weight", "lm_head"),
        TensorName("lm_head.bias", "lm_head_bias"),
        TensorName(f"{_LAYER}.input_layernorm.weight", "attn_norm"),
        TensorName(f"{_LAYER}.input_layernorm.bias", "attn_norm_bias"),
        *(name for name in HF_LAYER_NAMES if name.kind in ("qkv", "qkv_bias")),
        *linear_names(f"{_LAYER}.self_attn.q_layernorm", "q_norm"),
        *linear_names(f"{_LAYER}.self_attn.k_layernorm", "k_norm"),
        TensorName(f"{_LAYER}.self_attn.dense.weight", "o"),
        TensorName(f"{_LAYER}.self_attn.dense.bias", "o_bias"),
        TensorName(f"{_LAYER}.mlp.fc1.weight", "up"),
        TensorName(f"{_LAYER}.mlp.fc1.bias", "up_bias"),
        TensorName(f"{_LAYER}.mlp.fc2.weight", "down"),
        TensorName(f"{_LAYER}.mlp.fc2.bias", "down_bias"),
    ),
    gguf_names=(),
    defaults={
        "max_position_embeddings": 2048,
        "layer_norm_eps": 1e-5,
        "hidden_act": "gelu_new",
        "partial_rotary_factor": 0.5,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    eps_key="layer_norm_eps",
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
    lm_head_bias=True,
    qk_norm="qk_layernorm",
    layer_norm=True,
    norm_bias=True,
    gated_mlp=False,
    parallel=True,
)
