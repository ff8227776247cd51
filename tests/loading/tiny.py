"""Tiny models of every family: their config.json, tensors and files."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import save_file

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
EXTRA = {
    "llama": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 16},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "phi3": {},
    "gemma3_text": {"head_dim": 8, "hidden_activation": "gelu_pytorch_tanh"},
}


def config_of(model_type: str, **changes) -> dict:
    """A config.json of a tiny model."""
    base = {"model_type": model_type, **SIZES, "eos_token_id": 2, "bos_token_id": 1}
    return {**base, **EXTRA[model_type], **changes}


def tensor_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a Hugging Face checkpoint, written out by hand for each family."""
    kind, n, f = config["model_type"], config["hidden_size"], config["intermediate_size"]
    d = config.get("head_dim", n // config["num_attention_heads"])
    q, k = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], n), "model.norm.weight": (n,)}
    if not config.get("tie_word_embeddings", kind == "gemma3_text"):
        shapes["lm_head.weight"] = (config["vocab_size"], n)
    for i in range(config["num_hidden_layers"]):
        layer = {
            "input_layernorm.weight": (n,),
            "post_attention_layernorm.weight": (n,),
            "self_attn.o_proj.weight": (n, q),
            "mlp.down_proj.weight": (n, f),
        }
        if kind == "phi3":
            layer["self_attn.qkv_proj.weight"] = (q + 2 * k, n)
            layer["mlp.gate_up_proj.weight"] = (2 * f, n)
        else:
            for name, rows in (("q", q), ("k", k), ("v", k)):
                layer[f"self_attn.{name}_proj.weight"] = (rows, n)
                if kind == "qwen2":
                    layer[f"self_attn.{name}_proj.bias"] = (rows,)
            layer["mlp.gate_proj.weight"] = layer["mlp.up_proj.weight"] = (f, n)
        if kind in ("qwen3", "gemma3_text"):
            layer["self_attn.q_norm.weight"] = layer["self_attn.k_norm.weight"] = (d,)
        if kind == "gemma3_text":
            layer["pre_feedforward_layernorm.weight"] = (n,)
            layer["post_feedforward_layernorm.weight"] = (n,)
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def random_tensors(shapes: dict, dtype=np.float32, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        name: rng.standard_normal(shape, np.float32).astype(dtype) for name, shape in shapes.items()
    }


def fused(config: dict, tensors: dict) -> dict[str, np.ndarray]:
    """Return the engine's fused arrays, assembled by hand from a Hugging Face checkpoint."""
    kind, out = config["model_type"], {}
    out["embed"], out["final_norm"] = (
        tensors["model.embed_tokens.weight"],
        tensors["model.norm.weight"],
    )
    out["lm_head"] = tensors.get("lm_head.weight", out["embed"])
    for i in range(config["num_hidden_layers"]):
        get = {
            name.removeprefix(f"model.layers.{i}."): value
            for name, value in tensors.items()
            if name.startswith(f"model.layers.{i}.")
        }
        layer = {
            "attn_norm": get["input_layernorm.weight"],
            "o": get["self_attn.o_proj.weight"],
            "down": get["mlp.down_proj.weight"],
        }
        if kind == "phi3":
            layer["qkv"] = get["self_attn.qkv_proj.weight"]
            layer["gate_up"] = get["mlp.gate_up_proj.weight"]
        else:
            layer["qkv"] = np.concatenate([get[f"self_attn.{x}_proj.weight"] for x in "qkv"])
            layer["gate_up"] = np.concatenate([get[f"mlp.{x}_proj.weight"] for x in ("gate", "up")])
        if kind == "qwen2":
            layer["qkv_bias"] = np.concatenate([get[f"self_attn.{x}_proj.bias"] for x in "qkv"])
        if kind in ("qwen3", "gemma3_text"):
            layer["q_norm"] = get["self_attn.q_norm.weight"]
            layer["k_norm"] = get["self_attn.k_norm.weight"]
        if kind == "gemma3_text":
            layer["post_attn_norm"] = get["post_attention_layernorm.weight"]
            layer["mlp_norm"] = get["pre_feedforward_layernorm.weight"]
            layer["post_mlp_norm"] = get["post_feedforward_layernorm.weight"]
        else:
            layer["mlp_norm"] = get["post_attention_layernorm.weight"]
        out |= {f"layers.{i}.{name}": value for name, value in layer.items()}
    return out


def write_model(path: Path, model_type: str = "llama", dtype=np.float32, **changes):
    """Write a model's folder; return its config and tensors."""
    config = config_of(model_type, **changes)
    tensors = random_tensors(tensor_shapes(config), dtype)
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return config, tensors


def write_gguf(path: Path) -> None:
    """Write a llama model with matrices in Q8_0."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(16)
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(2.0)
    shapes = {
        "token_embd": (16, 32), "output_norm": (32,), "blk.0.attn_norm": (32,),
        "blk.0.ffn_norm": (32,), "blk.0.attn_q": (32, 32), "blk.0.attn_k": (16, 32),
        "blk.0.attn_v": (16, 32), "blk.0.attn_output": (32, 32), "blk.0.ffn_gate": (32, 32),
        "blk.0.ffn_up": (32, 32), "blk.0.ffn_down": (32, 32),
    }  # fmt: skip
    q8 = gguf.GGMLQuantizationType.Q8_0
    for name, shape in shapes.items():
        value = np.ones(shape, np.float32)
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", value)
        else:
            writer.add_tensor(f"{name}.weight", gguf.quantize(value, q8), raw_dtype=q8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


_GGUF_SHAPES = {
    "token_embd": (40, 32), "output_norm": (32,), "blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,),
    "blk.0.attn_q": (32, 32), "blk.0.attn_k": (16, 32), "blk.0.attn_v": (16, 32),
    "blk.0.attn_output": (32, 32), "blk.0.ffn_gate": (64, 32), "blk.0.ffn_up": (64, 32),
    "blk.0.ffn_down": (32, 64),
}  # fmt: skip
_GGUF_KEYS = {
    "llama.block_count": 1, "llama.context_length": 128, "llama.embedding_length": 32,
    "llama.feed_forward_length": 64, "llama.attention.head_count": 2,
    "llama.attention.head_count_kv": 1, "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 100.0, "tokenizer.ggml.eos_token_id": 2,
}  # fmt: skip


def llama_gguf(path: Path, metadata: dict | None = None, **options) -> Path:
    """Write a llama in float32 with `metadata` (None: left out); `options` are GGUFWriter's."""
    writer = gguf.GGUFWriter(path, "llama", **options)
    for name, value in {**_GGUF_KEYS, **(metadata or {})}.items():
        add_gguf_value(writer, name, value)
    tensors = random_tensors({f"{name}.weight": shape for name, shape in _GGUF_SHAPES.items()})
    for name, value in tensors.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_gguf_value(writer: gguf.GGUFWriter, name: str, value) -> None:
    """Add a metadata value in the type that llama.cpp's converter gives it; None is left out."""
    kinds = {
        bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32,
        str: writer.add_string, list: writer.add_array,
    }  # fmt: skip
    if type(value) is int and value < 0:
        writer.add_int32(name, value)
    elif value is not None:
        kinds[type(value)](name, value)
