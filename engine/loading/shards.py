"""Parts of whole weights that are in memory, as `load_weights` reads them from a file."""

from __future__ import annotations

from typing import Any

from engine.config import ModelConfig
from engine.device import array_module
from engine.loading.weight_table import shard_axis, shard_pieces, weight_shapes
from engine.weights import Shard, Weight

__all__ = ["take_part", "take_shard"]


def take_shard(weight: Weight, name: str, config: ModelConfig, shard: Shard) -> Weight:
    """Return a new weight: the part of a dense, whole one that `shard` has.

    Parameters
    ----------
    weight : Weight
    name : str
        Its name, "layers.0.qkv".
    config : ModelConfig
    shard : Shard

    Examples
    --------
    >>> import numpy as np
    >>> config = ModelConfig("llama", 5, 32, 1, 4, 2, 8, 48, 128)
    >>> whole = Weight.dense(np.ones((5, 32), np.float32))
    >>> take_shard(whole, "embed", config, Shard(1, 2)).data[:, 0]
    array([1., 1., 0.], dtype=float32)
    """
    kind = name.rpartition(".")[2]
    axis = shard_axis(kind, by_output=shard.by_output, expert_parallel=shard.expert_parallel)
    if axis is None:
        return weight
    return Weight.dense(take_part(weight.data, name, config, shard), shard, axis)


def take_part(whole: Any, name: str, config: ModelConfig, shard: Shard) -> Any:
    """Return the part of an array of a whole weight's shape, such as its codes, as a new array."""
    kind = name.rpartition(".")[2]
    shape = weight_shapes(config, shard)[name]
    bits = whole.view(f"u{whole.itemsize}")  # CuPy copies slices of few dtypes
    is_expert = kind.startswith("experts_")
    matrices = bits[slice(*shard.cut_experts(len(bits)))] if is_expert else bits[None]
    rows, columns = shard_pieces(kind, config, matrices.shape[1:], shard)
    own = array_module(bits).zeros((len(matrices), *_matrix(shape, kind)), bits.dtype)
    start = 0
    for first, last in rows:
        part = matrices[:, first:last]
        own[:, start : start + last - first] = part if columns is None else _cut(part, columns)
        start += last - first
    return own.reshape(shape).view(whole.dtype)


def _cut(rows: Any, columns: tuple[int, int]) -> Any:
    return rows[..., slice(*columns)]


def _matrix(shape: tuple[int, ...], kind: str) -> tuple[int, ...]:
    """Return the shape of one expert's part, or of the weight itself."""
    return shape[1:] if kind.startswith("experts_") else shape
