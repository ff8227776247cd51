"""Llama, Qwen3 and Qwen3-MoE in float64: the reference that `tests.quality.numerics` measures from.

Written from the published formulas, and independent of the engine: it reads the checkpoint itself,
uses no mirror, and keeps no KV cache. `tests/integrations/test_numerics.py` compares it with
transformers in float64.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  # NumPy's bfloat16, in which safetensors returns arrays
import numpy as np
from safetensors import safe_open

__all__ = ["logits"]

Array = np.ndarray[Any, np.dtype[np.float64]]

_MODEL_TYPES = ("llama", "qwen3", "qwen3_moe")


class _Checkpoint:
    """A folder in Hugging Face layout; tensors are widened to float64 when they are read."""

    def __init__(self, folder: Path) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        kind = self.config["model_type"]
        if kind not in _MODEL_TYPES:
            raise ValueError(f"model_type must be one of {', '.join(_MODEL_TYPES)}; got {kind!r}")
        if self.config.get("rope_scaling"):
            raise ValueError(f"rope_scaling must be null; got {self.config['rope_scaling']!r}")
        self._file = safe_open(folder / "model.safetensors", framework="numpy")
        self._names = frozenset(self._file.keys())

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def __getitem__(self, name: str) -> Array:
        tensor: Array = self._file.get_tensor(name).astype(np.float64)
        return tensor


def logits(folder: Path, token_ids: np.ndarray[Any, Any]) -> Array:
    """Return the logits (S, L, V) of all tokens of sequences `token_ids` (S, L)."""
    weights = _Checkpoint(folder)
    config = weights.config
    num_sequences, length = token_ids.shape
    x = weights["model.embed_tokens.weight"][token_ids.reshape(-1)]
    angles = _angles(config, length)
    for index in range(config["num_hidden_layers"]):
        name = f"model.layers.{index}."
        normed = _norm(x, weights[f"{name}input_layernorm.weight"], config)
        x += _attention(normed, weights, f"{name}self_attn.", angles, num_sequences)
        normed = _norm(x, weights[f"{name}post_attention_layernorm.weight"], config)
        is_moe = f"{name}mlp.gate.weight" in weights
        x += (_experts if is_moe else _mlp)(normed, weights, f"{name}mlp.")
    x = _norm(x, weights["model.norm.weight"], config)
    tied = config.get("tie_word_embeddings", False)
    head = weights["model.embed_tokens.weight" if tied else "lm_head.weight"]
    return (x @ head.T).reshape(num_sequences, length, -1)


def _norm(x: Array, weight: Array, config: Mapping[str, Any]) -> Array:
    mean_square = np.mean(x * x, axis=-1, keepdims=True)
    normed: Array = x / np.sqrt(mean_square + config["rms_norm_eps"]) * weight
    return normed


def _head_dim(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _angles(config: Mapping[str, Any], length: int) -> Array:
    """Return the rotation angles (L, D / 2)."""
    size = _head_dim(config)
    frequencies = config["rope_theta"] ** (-np.arange(0, size, 2, np.float64) / size)
    return np.outer(np.arange(length, dtype=np.float64), frequencies)


def _rotated(x: Array, angles: Array) -> Array:
    """Rotate the pairs (i, i + D/2) of x (S, L, heads, D)."""
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _attention(x: Array, weights: _Checkpoint, name: str, angles: Array, count: int) -> Array:
    config = weights.config
    size, length = _head_dim(config), len(angles)

    def heads(kind: str) -> Array:
        y = (x @ weights[f"{name}{kind}_proj.weight"].T).reshape(count, length, -1, size)
        norm = f"{name}{kind}_norm.weight"
        if norm in weights:
            y = _norm(y, weights[norm], config)
        return y

    q, k, v = _rotated(heads("q"), angles), _rotated(heads("k"), angles), heads("v")
    group = q.shape[2] // k.shape[2]
    k, v = np.repeat(k, group, axis=2), np.repeat(v, group, axis=2)
    scores = np.einsum("sihd,sjhd->shij", q, k) / np.sqrt(size)
    scores[..., np.triu(np.ones((length, length), bool), 1)] = -np.inf
    out = np.einsum("shij,sjhd->sihd", _softmax(scores), v).reshape(count * length, -1)
    projected: Array = out @ weights[f"{name}o_proj.weight"].T
    return projected


def _softmax(x: Array) -> Array:
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    shares: Array = powers / powers.sum(axis=-1, keepdims=True)
    return shares


def _mlp(x: Array, weights: _Checkpoint, name: str) -> Array:
    gate = x @ weights[f"{name}gate_proj.weight"].T
    up = x @ weights[f"{name}up_proj.weight"].T
    product: Array = (gate / (1 + np.exp(-gate)) * up) @ weights[f"{name}down_proj.weight"].T
    return product


def _experts(x: Array, weights: _Checkpoint, name: str) -> Array:
    """Return the weighted sum of each token's top experts."""
    config = weights.config
    shares = _softmax(x @ weights[f"{name}gate.weight"].T)
    top = np.argsort(-shares, axis=-1, kind="stable")[:, : config["num_experts_per_tok"]]
    factors = np.take_along_axis(shares, top, axis=-1)
    if config["norm_topk_prob"]:
        factors /= factors.sum(axis=-1, keepdims=True)
    out = np.zeros_like(x)
    for expert in np.unique(top):
        tokens, places = np.nonzero(top == expert)
        y = _mlp(x[tokens], weights, f"{name}experts.{expert}.")
        out[tokens] += factors[tokens, places, None] * y
    return out
