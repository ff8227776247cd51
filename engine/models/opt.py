"""OPT and Galactica: learned positions, LayerNorm, ReLU."""

from __future__ import annotations

from engine.models.family import Family, TensorName, linear_names

__all__ = ["OPT"]

_DECODER = "model.decoder"
_LAYER = f"{_DECODER}.layers.{{i}}"

OPT = Family(
    model_type="opt",
    names=(
        TensorName(f"{_DECODER}.embed_tokens.weight", "embed"),
        # The first two rows were for padding.
        TensorName(f"{_DECODER}.embed_positions.weight", "embed_positions", num_unread=2),
        *linear_names(f"{_DECODER}.final_layer_norm", "final_norm"),
        TensorName("lm_head.weight", "lm_head"),
        *linear_names(f"{_LAYER}.self_attn_layer_norm", "attn_norm"),
        *linear_names(f"{_LAYER}.self_attn.q_proj", "qkv", "q"),
        *linear_names(f"{_LAYER}.self_attn.k_proj", "qkv", "k"),
        *linear_names(f"{_LAYER}.self_attn.v_proj", "qkv", "v"),
        *linear_names(f"{_LAYER}.self_attn.out_proj", "o"),
        *linear_names(f"{_LAYER}.final_layer_norm", "mlp_norm"),
        *linear_names(f"{_LAYER}.fc1", "up"),
        *linear_names(f"{_LAYER}.fc2", "down"),
    ),
    gguf_names=(),
    defaults={
        "max_position_embeddings": 2048,
        "layer_norm_eps": 1e-5,
        "hidden_act": "relu",
        "enable_bias": True,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 2,
        "pad_token_id": 1,
    },
    key_aliases={"ffn_dim": "intermediate_size", "activation_function": "hidden_act"},
    eps_key="layer_norm_eps",
    qkv_bias="enable_bias",
    o_bias="enable_bias",
    mlp_bias="enable_bias",
    layer_norm=True,
    norm_bias=True,
    gated_mlp=False,
    learned_positions=True,
    rope_layers="none",
)
