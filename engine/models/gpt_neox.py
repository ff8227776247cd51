"""GPT-NeoX and Pythia: a norm for each of two parallel branches, q, k and v packed head by head."""

from __future__ import annotations

from engine.models.family import Family, TensorName, linear_names

__all__ = ["GPT_NEOX"]

_LAYER = "gpt_neox.layers.{i}"

GPT_NEOX = Family(
    model_type="gpt_neox",
    names=(
        TensorName("gpt_neox.embed_in.weight", "embed"),
        *linear_names("gpt_neox.final_layer_norm", "final_norm"),
        TensorName("embed_out.weight", "lm_head", form="published"),
        TensorName("lm_head.weight", "lm_head", form="new"),
        *linear_names(f"{_LAYER}.input_layernorm", "attn_norm"),
        *linear_names(f"{_LAYER}.attention.query_key_value", "qkv", "q|k|v"),
        *linear_names(f"{_LAYER}.attention.dense", "o"),
        *linear_names(f"{_LAYER}.post_attention_layernorm", "mlp_norm"),
        *linear_names(f"{_LAYER}.mlp.dense_h_to_4h", "up"),
        *linear_names(f"{_LAYER}.mlp.dense_4h_to_h", "down"),
    ),
    gguf_names=(),
    defaults={
        "max_position_embeddings": 2048,
        "layer_norm_eps": 1e-5,
        "hidden_act": "gelu",
        "partial_rotary_factor": 0.25,
        "attention_bias": True,
        "use_parallel_residual": True,
        "bos_token_id": 0,
        "eos_token_id": 2,
    },
    key_aliases={"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"},
    eps_key="layer_norm_eps",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    mlp_bias=True,
    layer_norm=True,
    norm_bias=True,
    gated_mlp=False,
    parallel="use_parallel_residual",
    parallel_norms=True,
)
