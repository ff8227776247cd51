"""Reads the scales of keys and values in 8 bits that a checkpoint may hold for its layers."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.loading.quantized.tensors import SCALE_DTYPES, ModuleTensors
from engine.loading.safetensors import SafetensorsDirectory, SafetensorsFile

__all__ = ["read_cache_scales"]

Array = np.ndarray[Any, Any]

# Names in an attention module, those of today before older ones.
_NAMES = (
    ("k_scale", "v_scale"),
    ("k_proj.k_scale", "v_proj.v_scale"),
    ("qkv_proj.k_scale", "qkv_proj.v_scale"),
    ("k_proj.output_scale", "v_proj.output_scale"),
    ("kv_scale", "kv_scale"),
)


def read_cache_scales(
    checkpoint: SafetensorsFile | SafetensorsDirectory, attention: str, num_heads: int
) -> tuple[Array, Array] | None:
    """Return the scales of keys and of values, (num_heads,) float32 each; None if there are none.

    A stored number is x / scale in e4m3, x a key after rope, or a value.

    Parameters
    ----------
    checkpoint : SafetensorsFile or SafetensorsDirectory
    attention : str
        The layer's module, such as "model.layers.0.self_attn".
    num_heads : int
        Heads of keys and values; a scale of the whole layer is repeated for each.

    Raises
    ------
    WeightsError
        If only one of the two is there, or a scale is not a positive number.
    """
    tensors = ModuleTensors(checkpoint, attention)
    for names in _NAMES:
        if any(tensors.has(name) for name in names):
            keys, values = (_scale(tensors, name, num_heads) for name in names)
            return keys, values
    return None


def _scale(tensors: ModuleTensors, name: str, num_heads: int) -> Array:
    shapes = [(), (1,), (num_heads,), (num_heads, 1), (num_heads, 1, 1)]
    stored = tensors.view(name, SCALE_DTYPES, *shapes).astype(np.float32)
    if not (np.isfinite(stored) & (stored > 0)).all():
        raise tensors.error(name, f"must have positive scales; got {stored.reshape(-1)[:4]}")
    scales: Array = np.broadcast_to(stored.reshape(-1), (num_heads,)).copy()
    return scales
