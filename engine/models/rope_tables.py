"""Rope tables of a model: their sizes, and the table used by each layer."""

from __future__ import annotations

import numpy as np

from engine.config import ModelConfig, RopeConfig
from engine.layers.rotary import table_shape

__all__ = ["rope_bytes", "rope_index", "ropes"]


def rope_bytes(config: ModelConfig, max_model_len: int) -> int:
    """Return the bytes of the rope tables for sequences of up to `max_model_len` tokens."""
    shapes = [table_shape(rope, max_model_len) for rope in ropes(config)]
    return sum(rows * columns * np.dtype(np.float32).itemsize for rows, columns in shapes)


def rope_index(config: ModelConfig, layer: int) -> int:
    """Return the index of the layer's rope table: layers with a window may use one of their own."""
    if not config.has_rope(layer):
        return len(ropes(config)) - 1
    return int(config.rope_local is not None and config.window(layer) > 0)


def ropes(config: ModelConfig) -> tuple[RopeConfig, ...]:
    """Return the RopeConfig of each of the model's tables."""
    own = (config.rope,) if config.rope_local is None else (config.rope, config.rope_local)
    if all(config.rope_layers):
        return own
    # For layers without rope, a table of zero angles is simpler than a second path through the
    # fused ops. It covers whole heads: the decode kernel requires that to store keys itself.
    return *own, RopeConfig(rotary_dim=config.head_dim, scaling="none")
