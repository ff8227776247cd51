"""Pad MLPs with zero features, so each weight row is a multiple of 16 bytes.

The fast kernels require this alignment, and some models' feature counts do not provide it.
"""

from __future__ import annotations

from typing import Any

from engine.config import ModelConfig
from engine.device import Device, array_module
from engine.dtypes import itemsize
from engine.loading.weight_memory import weight_room
from engine.weights import Weight

__all__ = ["pad_features", "pad_mlps"]

_ROW_ALIGNMENT = 16  # bytes


def pad_mlps(weights: dict[str, Weight], config: ModelConfig, device: Device, dtype: str) -> None:
    """Pad every dense MLP in `weights` in place, layer by layer, to 16-byte aligned rows.

    Raises
    ------
    OutOfMemoryError
        If a second copy of a layer's MLP does not fit on the device.
    """
    multiple = _ROW_ALIGNMENT // itemsize(dtype)
    is_aligned = config.intermediate_size % multiple == 0
    if is_aligned or not config.has_mlp or config.inner_norms:  # padding would enter the mean
        return
    with weight_room(config, device, dtype):
        for layer in (i for i in range(config.num_layers) if config.moe_of(i) is None):
            first = "gate_up" if config.gated_mlp else "up"
            names = [f"layers.{layer}.{name}" for name in (first, "down", f"{first}_bias")]
            if not weights[f"layers.{layer}.down"].format.is_dense:
                continue  # packed planes are already padded
            held = [weights[name].data if name in weights else None for name in names]
            padded = pad_features(*held, multiple=multiple)
            for name, array in zip(names, padded, strict=True):
                if array is not None:
                    weights[name] = Weight.dense(array)
            if device.is_cuda:  # the pool cannot reuse blocks slightly too small
                device.xp.get_default_memory_pool().free_all_blocks()


def pad_features(
    gate_up: Any, down: Any, gate_up_bias: Any = None, *, multiple: int
) -> tuple[Any, Any, Any]:
    """Return the weights of an equivalent MLP whose feature count is a multiple of `multiple`.

    Parameters
    ----------
    gate_up : (2F, N) or (F, N) array
        Gate and up, or up alone.
    down : (N, F) array
    gate_up_bias : (2F,) or (F,) array, optional
    multiple : int

    Returns
    -------
    gate_up, down, gate_up_bias
        New arrays with F rounded up, or the same arrays if F is already a multiple. A padding
        feature evaluates to act(0) * 0 = 0 (or act(0) = 0), and its column of `down` is 0.

    Examples
    --------
    >>> import numpy as np
    >>> gate_up, down, _ = pad_features(np.ones((6, 2)), np.ones((2, 3)), multiple=4)
    >>> gate_up[:, 0], down[0]
    (array([1., 1., 1., 0., 1., 1., 1., 0.]), array([1., 1., 1., 0.]))
    """
    features = down.shape[1]
    total = -(-features // multiple) * multiple
    if total == features:
        return gate_up, down, gate_up_bias

    def padded(array: Any) -> Any:
        parts = array.shape[0] // features  # gate and up, or up alone
        wide = _zeros_like(array, (parts, total, *array.shape[1:]))
        wide[:, :features] = _bits(array).reshape(parts, features, *array.shape[1:])
        return wide.reshape(parts * total, *array.shape[1:]).view(array.dtype)

    columns = _zeros_like(down, (down.shape[0], total))
    columns[:, :features] = _bits(down)
    bias = None if gate_up_bias is None else padded(gate_up_bias)
    return padded(gate_up), columns.view(down.dtype), bias


def _bits(array: Any) -> Any:
    """View the array as integers: CuPy cannot copy slices of every dtype."""
    return array.view(f"u{array.itemsize}")


def _zeros_like(array: Any, shape: tuple[int, ...]) -> Any:
    """Return zeros of `shape` on the array's device, as integers of its itemsize."""
    return array_module(array).zeros(shape, f"u{array.itemsize}")
