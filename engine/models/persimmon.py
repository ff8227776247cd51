"""Persimmon: LayerNorms, also of the heads of q and k, and an MLP without a gate."""

from __future__ import annotations

from engine.models.family import Family, TensorName, linear_names

__all__ = ["PERSIMMON"]

_LAYER = "model.layers.{i}"
_ATTENTION = f"{_LAYER}.self_attn"

PERSIMMON = Family(
    model_type="persimmon",
    names=(
        TensorName("model.embed_tokens.weight", "embed"),
        *linear_names("model.final_layernorm", "final_norm"),
        TensorName("lm_head.weight", "lm_head"),
        *linear_names(f"{_LAYER}.input_layernorm", "attn_norm"),
        *linear_names(f"{_ATTENTION}.query_key_value", "qkv", "q|k|v"),
        *linear_names(f"{_ATTENTION}.q_layernorm", "q_norm"),
        *linear_names(f"{_ATTENTION}.k_layernorm", "k_norm"),
        *linear_names(f"{_ATTENTION}.dense", "o"),
        *linear_names(f"{_LAYER}.post_attention_layernorm", "mlp_norm"),
        *linear_names(f"{_LAYER}.mlp.dense_h_to_4h", "up"),
        *linear_names(f"{_LAYER}.mlp.dense_4h_to_h", "down"),
    ),
    gguf_names=(),
    defaults={
        "max_position_embeddings": 16384,
        "intermediate_size": 16384,
        "layer_norm_eps": 1e-5,
        "hidden_act": "relu2",
        "partial_rotary_factor": 0.5,
        "qk_layernorm": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    eps_key="layer_norm_eps",
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
    qk_norm="qk_layernorm",
    layer_norm=True,
    norm_bias=True,
    gated_mlp=False,
)
