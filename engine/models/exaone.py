"""EXAONE 3.0, 3.5 and Deep: Llama under GPT-2's names of tensors and keys."""

from __future__ import annotations

from dataclasses import replace

from engine.models.family import TensorName, linear_names
from engine.models.llama import LLAMA

__all__ = ["EXAONE"]

_LAYER = "transformer.h.{i}"
_ATTENTION = f"{_LAYER}.attn.attention"

EXAONE = replace(
    LLAMA,
    model_type="exaone",
    names=(
        TensorName("transformer.wte.weight", "embed"),
        TensorName("transformer.ln_f.weight", "final_norm"),
        TensorName("lm_head.weight", "lm_head"),
        TensorName(f"{_LAYER}.ln_1.weight", "attn_norm"),
        TensorName(f"{_LAYER}.ln_2.weight", "mlp_norm"),
        *linear_names(f"{_ATTENTION}.q_proj", "qkv", "q"),
        *linear_names(f"{_ATTENTION}.k_proj", "qkv", "k"),
        *linear_names(f"{_ATTENTION}.v_proj", "qkv", "v"),
        *linear_names(f"{_ATTENTION}.out_proj", "o"),
        *linear_names(f"{_LAYER}.mlp.c_fc_0", "gate_up", "gate"),
        *linear_names(f"{_LAYER}.mlp.c_fc_1", "gate_up", "up"),
        *linear_names(f"{_LAYER}.mlp.c_proj", "down"),
    ),
    gguf_names=(),
    gguf_arch="",
    gguf_interleaved_rope=False,
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "bos_token_id": 1,
        "eos_token_id": 361,
        "pad_token_id": 0,
    },
    key_aliases={
        "num_layers": "num_hidden_layers",
        "layer_norm_epsilon": "rms_norm_eps",
        "activation_function": "hidden_act",
    },
)
