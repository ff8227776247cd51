"""gpt-oss: experts with biases and a clamped SwiGLU, attention sinks, windows in even layers."""

from __future__ import annotations

from engine.models.expert_names import GGUF_EXPERT_NAMES, fused_expert_names, router_names
from engine.models.family import GGUF_SPLIT_NAMES, Family, TensorName
from engine.models.llama import LLAMA_NAMES
from engine.models.moe_family import MoeFamily
from engine.models.tensor_layout import Layout

__all__ = ["GPT_OSS"]

_MLP = "model.layers.{i}.mlp"
_BIAS = Layout(transposed=True)

GPT_OSS = Family(
    model_type="gpt_oss",
    names=(
        *LLAMA_NAMES,
        TensorName("model.layers.{i}.self_attn.sinks", "sinks"),
        *router_names("mlp.router"),
        TensorName(f"{_MLP}.router.bias", "router_bias"),
        *fused_expert_names(
            "mlp",
            "experts.gate_up_proj_blocks",
            "experts.down_proj_blocks",
            layout=Layout(mxfp4=True),
            gate_up_layout=Layout(interleaved=True, mxfp4=True),
            form="published",
        ),
        *fused_expert_names(
            layout=Layout(transposed=True),
            gate_up_layout=Layout(transposed=True, interleaved=True),
        ),
        TensorName(
            f"{_MLP}.experts.gate_up_proj_bias",
            "experts_gate_up_bias",
            layout=Layout(transposed=True, interleaved=True),
        ),
        TensorName(f"{_MLP}.experts.down_proj_bias", "experts_down_bias", layout=_BIAS),
    ),
    gguf_names=(
        *(name for name in GGUF_SPLIT_NAMES if name.kind not in ("mlp_norm", "post_attn_norm")),
        TensorName("blk.{i}.post_attention_norm.weight", "mlp_norm"),
        TensorName("blk.{i}.attn_sinks.weight", "sinks"),
        *GGUF_EXPERT_NAMES,
        TensorName("blk.{i}.ffn_gate_inp.bias", "router_bias"),
        TensorName("blk.{i}.ffn_gate_exps.bias", "experts_gate_up_bias", "expert_gate", _BIAS),
        TensorName("blk.{i}.ffn_up_exps.bias", "experts_gate_up_bias", "expert_up", _BIAS),
        TensorName("blk.{i}.ffn_down_exps.bias", "experts_down_bias", "", _BIAS),
    ),
    gguf_arch="gpt-oss",
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "sliding_window_pattern": 2,
        "rope_theta": 150000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    sinks=True,
    windows="pattern",
    moe=MoeFamily(num_experts=128, router_bias=True, expert_bias=True, activation="swiglu_clamped"),
)
