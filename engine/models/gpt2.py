"""GPT-2 and DistilGPT2: learned positions, LayerNorm, matrices stored transposed."""

from __future__ import annotations

from engine.models.family import (
    GGUF_NORM_BIASES,
    GGUF_PACKED_NAMES,
    Family,
    TensorName,
    linear_names,
)
from engine.models.tensor_layout import Layout

__all__ = ["GPT2", "GPT2_DEFAULTS", "GPT2_KEYS", "GPT2_NAMES"]

_LAYER = "transformer.h.{i}"

GPT2_KEYS = {
    "n_positions": "max_position_embeddings",
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "activation_function": "hidden_act",
}
"""GPT-2's names of keys -> the shared ones."""

GPT2_DEFAULTS = {
    "max_position_embeddings": 1024,
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "tie_word_embeddings": True,
    "bos_token_id": 50256,
    "eos_token_id": 50256,
}

GPT2_NAMES = (
    TensorName("transformer.wte.weight", "embed"),
    TensorName("transformer.wpe.weight", "embed_positions"),
    *linear_names("transformer.ln_f", "final_norm"),
    TensorName("lm_head.weight", "lm_head"),
    *linear_names(f"{_LAYER}.ln_1", "attn_norm"),
    *linear_names(f"{_LAYER}.ln_2", "mlp_norm"),
)
"""Names of the tensors outside of the layers' products, which other families have too."""


def _conv1d_names(checkpoint: str, kind: str) -> tuple[TensorName, ...]:
    """Name a `Conv1D`'s matrix, (in, out), and its bias.

    Quantized checkpoints store the matrix as a linear layer's, (out, in), as adapters do.
    """
    weight, bias = linear_names(f"{_LAYER}.{checkpoint}", kind)
    conv1d = weight._replace(layout=Layout(transposed=True), form="conv1d")
    return conv1d, weight._replace(form="linear"), bias


GPT2 = Family(
    model_type="gpt2",
    names=(
        *GPT2_NAMES,
        *_conv1d_names("attn.c_attn", "qkv"),
        *_conv1d_names("attn.c_proj", "o"),
        *_conv1d_names("mlp.c_fc", "up"),
        *_conv1d_names("mlp.c_proj", "down"),
    ),
    gguf_names=(
        *(name for name in GGUF_PACKED_NAMES if not name.kind.startswith("gate_up")),
        *GGUF_NORM_BIASES,
        TensorName("position_embd.weight", "embed_positions"),
        *linear_names("blk.{i}.ffn_up", "up"),
    ),
    gguf_arch="gpt2",
    defaults={
        **GPT2_DEFAULTS,
        "hidden_act": "gelu_new",
        "scale_attn_by_inverse_layer_idx": False,
    },
    key_aliases=GPT2_KEYS,
    eps_key="layer_norm_epsilon",
    mlp_ratio=4,
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
    layer_norm=True,
    norm_bias=True,
    gated_mlp=False,
    learned_positions=True,
    rope_layers="none",
)
