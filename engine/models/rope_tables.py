"""Rope tables of a model: their sizes, the table used by each layer, and their computation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from engine.config import ModelConfig, RopeConfig
from engine.layers.rotary import q_factors, rope_rows, table_shape

__all__ = ["RopeTable", "has_q_factors", "rope_bytes", "rope_index", "ropes"]

_STEP = 8192  # positions computed at a time: 9 ms for 128 features


class RopeTable:
    """A rope table on a device, computed as far as sequences have reached.

    A config.json may state millions of positions. Their rows are allocated at once, because kernels
    keep the address, but the host touches and computes them only on demand.

    Parameters
    ----------
    xp : module
        `numpy` or `cupy`.
    config : RopeConfig
    num_positions : int
        Maximum sequence length in tokens.

    Attributes
    ----------
    array : (P, R) array of float32
        See `engine.layers.rotary.rope_table`; zero where it has not been computed.
    q_factors : (P,) array of float32, or None
        Factors on rotated queries, if the config has any.

    Examples
    --------
    >>> table = RopeTable(np, RopeConfig(rotary_dim=2), 1 << 20)
    >>> table.extend(10000)
    >>> table.num_computed, table.array[1].round(2)
    (16384, array([0.54, 0.84], dtype=float32))
    """

    def __init__(self, xp: Any, config: RopeConfig, num_positions: int) -> None:
        self.array = xp.zeros(table_shape(config, num_positions), np.float32)
        self.q_factors = None
        if config.q_scale_beta:
            positions = np.arange(len(self.array)) % num_positions
            self.q_factors = xp.asarray(q_factors(config, positions))
        self.num_computed = 0
        self._config = config
        self._num_positions = num_positions

    @property
    def num_bytes(self) -> int:
        """Bytes of the table and of the factors."""
        factors = 0 if self.q_factors is None else self.q_factors.nbytes
        return int(self.array.nbytes + factors)

    def extend(self, num_positions: int) -> None:
        """Compute the rows of the first `num_positions` positions, at least."""
        stop = min(-(-num_positions // _STEP) * _STEP, self._num_positions)
        start = self.num_computed
        if stop <= start:
            return
        for first, rows in rope_rows(self._config, self._num_positions, start, stop):
            target = self.array[first : first + len(rows)]
            if isinstance(target, np.ndarray):
                target[...] = rows
            else:
                target.set(rows)
        self.num_computed = stop


def rope_bytes(config: ModelConfig, max_model_len: int) -> int:
    """Return the bytes of the rope tables for sequences of up to `max_model_len` tokens."""
    total = 0
    for rope in ropes(config):
        rows, columns = table_shape(rope, max_model_len)
        total += rows * (columns + (rope.q_scale_beta != 0)) * np.dtype(np.float32).itemsize
    return total


def has_q_factors(config: ModelConfig) -> bool:
    """Tell whether any layer multiplies its rotated queries by factors."""
    return any(rope.q_scale_beta for rope in ropes(config))


def rope_index(config: ModelConfig, layer: int) -> int:
    """Return the index of the layer's rope table; it may depend on the layer, or its window."""
    if not config.has_rope(layer):
        return len(ropes(config)) - 1
    if config.rope_thetas:
        return _thetas(config).index(config.rope_thetas[layer])
    return int(config.rope_local is not None and config.window(layer) > 0)


def _thetas(config: ModelConfig) -> tuple[float, ...]:
    """Return the bases of the layers that have rope, each once."""
    return tuple(theta for theta in dict.fromkeys(config.rope_thetas) if theta)


def ropes(config: ModelConfig) -> tuple[RopeConfig, ...]:
    """Return the RopeConfig of each of the model's tables."""
    own = tuple(rope for rope in (config.rope, config.rope_local) if rope is not None)
    if config.rope_thetas:
        own = tuple(replace(config.rope, theta=theta) for theta in _thetas(config))
    if all(config.rope_layers):
        return own
    # For layers without rope, a table of zero angles is simpler than a second path through the
    # fused ops. It covers whole heads: the decode kernel requires that to store keys itself.
    width = config.head_dim if config.mla is None else config.mla.rope_dim
    none = replace(config.no_rope, rotary_dim=width)
    return (*own, none) if any(config.rope_layers) else (none,)
