"""The models of `tests.quality.numerics`, written as bfloat16 checkpoints in Hugging Face layout.

`smollm2` is SmolLM2-135M with its real weights, dequantized and rounded to bfloat16. `dense` and
`experts` have random weights. In those, every branch adds about as much to the residual stream as
the stream holds, attention is peaked, and the distributions of the next token have a few likely
tokens: no layer can be wrong without a trace in the logits.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

import engine
from engine.device import to_numpy
from tests.quality.text import text

__all__ = ["MODELS", "SIZES", "Made", "make"]

Array = np.ndarray[Any, Any]

_SHARED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_DENSE = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
_EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}


def _sizes(
    hidden: int, layers: int, heads: int, kv_heads: int, head_dim: int, features: int, vocab: int
) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": features,
        "vocab_size": vocab,
    }


def _of_experts(count: int, top: int, features: int) -> dict[str, int]:
    return {"num_experts": count, "num_experts_per_tok": top, "moe_intermediate_size": features}


SIZES: dict[str, dict[str, dict[str, Any]]] = {
    # Llama-3.2-1B's layers with QK-norm; Qwen3-30B-A3B's proportions.
    "1b": {
        "dense": _DENSE | _sizes(2048, 16, 32, 8, 64, 8192, 32768),
        "experts": _EXPERTS | _sizes(1024, 12, 16, 4, 128, 3072, 32768) | _of_experts(64, 8, 384),
    },
    "10m": {
        "dense": _DENSE | _sizes(256, 8, 4, 2, 64, 768, 4096),
        "experts": _EXPERTS | _sizes(256, 8, 4, 2, 64, 768, 4096) | _of_experts(32, 4, 96),
    },
    "tiny": {
        "dense": _DENSE | _sizes(64, 3, 4, 2, 16, 128, 256),
        "experts": _EXPERTS | _sizes(64, 3, 4, 2, 16, 128, 256) | _of_experts(8, 2, 32),
    },
}
"""Size of the random models -> model -> its config.json."""
MODELS = ("smollm2", "dense", "experts")

_SCORE_SCALE = 1.5  # QK-norm weights: scores have a standard deviation of about its square
_LOGIT_SCALE = 3.0  # standard deviation of the logits
_NORM_SPREAD = 0.3  # standard deviation of the logarithm of a norm's weights
_BF16 = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True)
class Made:
    """A checkpoint, and the tokens on which it is measured.

    Attributes
    ----------
    name : str
        "SmolLM2-135M", "dense 1b", ...
    folder : Path
    token_ids : (S, L) array of int
    """

    name: str
    folder: Path
    token_ids: Array


def make(model: str, size: str, folder: Path, num_sequences: int, length: int) -> Made:
    """Write `model`, one of MODELS, to `folder`; `size` is the random models', a key of SIZES.

    The sequences are excerpts of `text()` for SmolLM2, otherwise random tokens.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shape = num_sequences, length
    if model == "smollm2":
        return Made("SmolLM2-135M", folder, _write_smollm2(folder, shape))
    config = _SHARED | SIZES[size][model]
    _write(folder, config, dict(_random_tensors(config)))
    rng = np.random.default_rng(1)
    return Made(f"{model} {size}", folder, rng.integers(0, config["vocab_size"], shape))


def _write(folder: Path, config: dict[str, Any], tensors: dict[str, Array]) -> None:
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _write_smollm2(folder: Path, shape: tuple[int, int]) -> Array:
    """Write SmolLM2, and return tokens (S, L) from evenly spaced places of the text."""
    with engine.load("smollm2", device="cpu", dtype="bfloat16", quantization="none") as model:
        c = model.config
        weights = {name: to_numpy(w.data) for name, w in model.decoder.weights.items()}
        ids = np.array(model.tokenizer.encode(text()))
    config = _SHARED | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **_sizes(
            *(c.hidden_size, c.num_layers, c.num_heads, c.num_kv_heads, c.head_dim),
            *(c.intermediate_size, c.vocab_size),
        ),
        "rms_norm_eps": c.rms_norm_eps,
        "rope_theta": c.rope.theta,
        "tie_word_embeddings": c.tie_word_embeddings,
    }
    tensors = {
        "model.embed_tokens.weight": weights["embed"],
        "model.norm.weight": weights["final_norm"],
    }
    rows = np.cumsum([c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim])
    for i in range(c.num_layers):
        ours, name = f"layers.{i}.", f"model.layers.{i}."
        q, k, v = np.split(weights[f"{ours}qkv"], rows)
        gate, up = np.split(weights[f"{ours}gate_up"], 2)
        tensors |= {
            f"{name}input_layernorm.weight": weights[f"{ours}attn_norm"],
            f"{name}self_attn.q_proj.weight": q,
            f"{name}self_attn.k_proj.weight": k,
            f"{name}self_attn.v_proj.weight": v,
            f"{name}self_attn.o_proj.weight": weights[f"{ours}o"],
            f"{name}post_attention_layernorm.weight": weights[f"{ours}mlp_norm"],
            f"{name}mlp.gate_proj.weight": gate,
            f"{name}mlp.up_proj.weight": up,
            f"{name}mlp.down_proj.weight": weights[f"{ours}down"],
        }
    _write(folder, config, {name: np.ascontiguousarray(t) for name, t in tensors.items()})
    starts = np.arange(shape[0]) * (len(ids) // shape[0])
    return ids[starts[:, None] + np.arange(shape[1])]


def _random_tensors(config: dict[str, Any]) -> Iterator[tuple[str, Array]]:
    """Yield (name, tensor) of a random model."""
    rng = np.random.default_rng(0)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> Array:
        values = rng.standard_normal((rows, columns), np.float32)
        return (values * np.float32(scale * columns**-0.5)).astype(_BF16)

    def norm(size: int, scale: float = 1.0) -> Array:
        return (scale * np.exp(_NORM_SPREAD * rng.standard_normal(size))).astype(_BF16)

    hidden, head = config["hidden_size"], config["head_dim"]
    vocab = config["vocab_size"]
    q_rows, kv_rows = (config[f"num_{k}_heads"] * head for k in ("attention", "key_value"))
    yield "model.embed_tokens.weight", matrix(vocab, hidden, hidden**0.5)
    yield "lm_head.weight", matrix(vocab, hidden, _LOGIT_SCALE)
    yield "model.norm.weight", norm(hidden)
    for i in range(config["num_hidden_layers"]):
        name = f"model.layers.{i}."
        yield f"{name}input_layernorm.weight", norm(hidden)
        yield f"{name}post_attention_layernorm.weight", norm(hidden)
        for kind in "qk":
            yield f"{name}self_attn.{kind}_norm.weight", norm(head, _SCORE_SCALE)
        for kind, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
            yield f"{name}self_attn.{kind}_proj.weight", matrix(rows, hidden)
        yield f"{name}self_attn.o_proj.weight", matrix(hidden, q_rows, 1.5)
        mlps = {f"{name}mlp.": config["intermediate_size"]}
        if "num_experts" in config:
            yield f"{name}mlp.gate.weight", matrix(config["num_experts"], hidden)
            experts = range(config["num_experts"])
            mlps = {f"{name}mlp.experts.{e}.": config["moe_intermediate_size"] for e in experts}
        for part, features in mlps.items():
            yield f"{part}gate_proj.weight", matrix(features, hidden)
            yield f"{part}up_proj.weight", matrix(features, hidden)
            yield f"{part}down_proj.weight", matrix(hidden, features, 2.0)
