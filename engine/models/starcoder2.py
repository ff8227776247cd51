"""StarCoder2: LayerNorm, an MLP without a gate, biases everywhere."""

from __future__ import annotations

from engine.models.family import HF_LAYER_NAMES, HF_NAMES, HF_NORM_BIASES, Family, TensorName

__all__ = ["STARCODER2"]

_MLP = "model.layers.{i}.mlp"

STARCODER2 = Family(
    model_type="starcoder2",
    names=(
        *(name for name in HF_NAMES if "mlp" not in name.checkpoint),
        *(name for name in HF_LAYER_NAMES if name.kind in ("qkv", "qkv_bias")),
        TensorName("model.layers.{i}.post_attention_layernorm.weight", "mlp_norm"),
        *HF_NORM_BIASES,
        TensorName(f"{_MLP}.c_fc.weight", "up"),
        TensorName(f"{_MLP}.c_fc.bias", "up_bias"),
        TensorName(f"{_MLP}.c_proj.weight", "down"),
        TensorName(f"{_MLP}.c_proj.bias", "down_bias"),
    ),
    gguf_names=(),  # NOTE: a .gguf does not record whether the model has windows.
    defaults={
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "norm_epsilon": 1e-5,
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": True,
        "tie_word_embeddings": True,
        "bos_token_id": 50256,
        "eos_token_id": 50256,
    },
    eps_key="norm_epsilon",
    qkv_bias="use_bias",
    o_bias="use_bias",
    mlp_bias="use_bias",
    layer_norm=True,
    norm_bias=True,
    gated_mlp=False,
    windows="every_layer",
)
