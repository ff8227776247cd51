"""Falcon 7B, 40B, 180B and Falcon 2: parallel blocks, LayerNorm, an MLP without a gate."""

from __future__ import annotations

from engine.models.family import Family, TensorName, linear_names

__all__ = ["FALCON"]

_LAYER = "transformer.h.{i}"


def _norm_names(kind: str, *norms: str) -> tuple[TensorName, ...]:
    """Name a norm that is called one of `norms`, depending on the kind of block."""
    return tuple(
        name._replace(form=norm)
        for norm in norms
        for name in linear_names(f"{_LAYER}.{norm}", kind)
    )


FALCON = Family(
    model_type="falcon",
    names=(
        TensorName("transformer.word_embeddings.weight", "embed"),
        *linear_names("transformer.ln_f", "final_norm"),
        TensorName("lm_head.weight", "lm_head"),
        *_norm_names("attn_norm", "input_layernorm", "ln_attn"),
        *_norm_names("mlp_norm", "post_attention_layernorm", "ln_mlp"),
        *linear_names(f"{_LAYER}.self_attention.query_key_value", "qkv", "q|k|v"),
        *linear_names(f"{_LAYER}.self_attention.dense", "o"),
        *linear_names(f"{_LAYER}.mlp.dense_h_to_4h", "up"),
        *linear_names(f"{_LAYER}.mlp.dense_4h_to_h", "down"),
    ),
    gguf_names=(),
    defaults={
        "max_position_embeddings": 2048,
        "layer_norm_epsilon": 1e-5,
        "hidden_act": "gelu",
        "parallel_attn": True,
        "tie_word_embeddings": True,
        "bos_token_id": 11,
        "eos_token_id": 11,
    },
    key_aliases={
        "activation": "hidden_act",
        "ffn_hidden_size": "intermediate_size",
        "num_kv_heads": "num_key_value_heads",
    },
    eps_key="layer_norm_epsilon",
    mlp_ratio=4,
    multi_query=True,
    qkv_bias="bias",
    o_bias="bias",
    mlp_bias="bias",
    layer_norm=True,
    norm_bias=True,
    gated_mlp=False,
    parallel="parallel_attn",
    parallel_norms="num_ln_in_parallel_attn",
)
