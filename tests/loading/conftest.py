"""Tiny models of every family, as Hugging Face directories and as .gguf files."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
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


@pytest.fixture
def make_model(tmp_path):
    """Write a tiny model directory; returns (path, config, tensors)."""

    def make(model_type: str = "llama", dtype=np.float32, **changes):
        config = config_of(model_type, **changes)
        tensors = random_tensors(tensor_shapes(config), dtype)
        path = tmp_path / model_type
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps(config))
        save_file(tensors, path / "model.safetensors")
        return path, config, tensors

    return make


@pytest.fixture
def raw_safetensors(tmp_path):
    """Write a .safetensors file from a header (an object, or raw bytes) and its data."""

    def make(header, data: bytes = b"", name: str = "raw.safetensors") -> Path:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        path = tmp_path / name
        path.write_bytes(struct.pack("<Q", len(text)) + text + data)
        return path

    return make


@pytest.fixture
def configs() -> dict:
    """config.json files as published ("old"; Phi's factors are made up) and as transformers 5
    saves them ("new").
    """
    return json.loads((Path(__file__).parent / "configs.json").read_text())


@pytest.fixture
def tiny():
    """The functions that describe tiny models: config_of, tensor_shapes, random_tensors, fused."""

    class Tiny:
        families = tuple(EXTRA)

    Tiny.fused = staticmethod(fused)
    Tiny.config_of = staticmethod(config_of)
    Tiny.tensor_shapes = staticmethod(tensor_shapes)
    Tiny.random_tensors = staticmethod(random_tensors)
    return Tiny


@pytest.fixture
def smollm2():
    from engine.loading.download import local_path

    path = local_path("smollm2")
    if path is None:
        pytest.skip("SmolLM2 is not in the cache (engine pull smollm2)")
    return path
