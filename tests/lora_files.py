"""Random LoRA adapters as peft writes them, and the checkpoints with the same adapters merged."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from engine.loading.weight_table import matrix_placements
from engine.models.registry import family
from engine.models.wrappers import text_name


def adaptable(model, tensors):
    """Return the names of the checkpoint's tensors that an adapter of `model` may change."""
    config = model.config
    table = matrix_placements(config, family(config.model_type).names)
    products = model.decoder.adapters.products
    found = []
    for name, tensor in tensors.items():
        forms = table.get(text_name(name), []) if tensor.ndim == 2 else []
        places = [place for _, make in forms for place in make()]
        if places and all(str(place.target) in products for place in places):
            found.append(name)
    return found


def random_adapter(names, tensors, rank, seed=0, strength=0.3):
    """Return {tensor: (A, B)} of random matrices of this rank."""
    rng = np.random.default_rng(seed)
    pairs = {}
    for name in names:
        rows, columns = tensors[name].shape
        a = rng.standard_normal((rank, columns)) / np.sqrt(columns)
        b = strength * rng.standard_normal((rows, rank))
        pairs[name] = a.astype(np.float32), b.astype(np.float32)
    return pairs


def write_adapter(folder: Path, pairs, rank, biases=None, **config):
    """Write a folder as peft's `save_pretrained` does; `biases`: tensor -> its lora_B.bias."""
    folder.mkdir(parents=True)
    tensors = {}
    for name, (a, b) in pairs.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        tensors[f"{module}.lora_A.weight"] = a
        tensors[f"{module}.lora_B.weight"] = b
    for name, bias in (biases or {}).items():
        tensors[f"base_model.model.{name.removesuffix('.weight')}.lora_B.bias"] = bias
    save_file(tensors, folder / "adapter_model.safetensors")
    values = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, **config}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return folder


def write_merged(folder: Path, base: Path, pairs, scale=1.0):
    """Write the checkpoint `base` with W + scale B A in place of each adapted W."""
    folder.mkdir(parents=True)
    tensors = load_file(base / "model.safetensors")
    for name, (a, b) in pairs.items():
        merged = tensors[name] + scale * (b.astype(np.float64) @ a)
        tensors[name] = merged.astype(np.float32)
    (folder / "config.json").write_bytes((base / "config.json").read_bytes())
    save_file(tensors, folder / "model.safetensors")
    return folder
