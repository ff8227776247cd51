"""AFM-4.5B: Llama whose MLP has no gate, with ReLU squared."""

from __future__ import annotations

from engine.models.family import HF_NAMES, HF_UNGATED_LAYER_NAMES, Family, TensorName

__all__ = ["ARCEE", "ARCEE_NAMES"]

ARCEE_NAMES: tuple[TensorName, ...] = (
    *HF_NAMES,
    *HF_UNGATED_LAYER_NAMES,
    TensorName("model.layers.{i}.post_attention_layernorm.weight", "mlp_norm"),
)
"""Names of a checkpoint with two norms per layer and an MLP without a gate."""

ARCEE = Family(
    model_type="arcee",
    names=ARCEE_NAMES,
    gguf_names=(),
    defaults={
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "hidden_act": "relu2",
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    mlp_bias="mlp_bias",
    gated_mlp=False,
)
