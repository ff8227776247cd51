"""The gated feed-forward block: down(act(gate x) · up x)."""

from __future__ import annotations

from typing import Any

from engine import kernels
from engine.device import array_module
from engine.errors import ConfigError
from engine.layers.linear import Linear
from engine.layers.norm import Norm

__all__ = ["MLP", "pad_features"]

_GELU = {"gelu": "none", "gelu_tanh": "tanh"}


class MLP:
    """Gate and up in one product, with SiLU their gated product too where that pays, then down.

    Parameters
    ----------
    gate_up : Linear
        (2F, N): the rows of gate, then those of up.
    down : Linear
        (N, F).
    activation : str
        Of the gate: "silu", "gelu" (erf) or "gelu_tanh".

    Raises
    ------
    ConfigError
        If the activation is none of these.
    """

    __slots__ = ("activation", "down", "gate_up")

    def __init__(self, gate_up: Linear, down: Linear, activation: str) -> None:
        if activation != "silu" and activation not in _GELU:
            raise ConfigError(
                f"activation must be 'silu', 'gelu' or 'gelu_tanh'; got {activation!r}"
            )
        self.gate_up = gate_up
        self.down = down
        self.activation = activation

    def __call__(self, x: Any, *, norm: Norm | None = None, residual: Any = None) -> Any:
        """Return the block's output (T, N) for `x` (T, N), or for ``norm(x)``.

        With a `residual` (T, N), which may be `x`, it is added to that.
        """
        return self.down(self._gated(x, norm), residual=residual)

    def _gated(self, x: Any, norm: Norm | None) -> Any:
        """Return act(gate) * up (T, F)."""
        activation = "swiglu" if self.activation == "silu" else None
        if norm is None:
            product = self.gate_up(x, activation=activation)
        else:
            product = self.gate_up.of_normed(x, norm, activation=activation)
        if activation is not None:
            return product
        return kernels.geglu(product, approximate=_GELU[self.activation])


def pad_features(
    gate_up: Any, down: Any, gate_up_bias: Any = None, *, multiple: int
) -> tuple[Any, Any, Any]:
    """Return the weights of the same block with a multiple of so many features.

    Parameters
    ----------
    gate_up : (2F, N) array
    down : (N, F) array
    gate_up_bias : (2F,) array, optional
    multiple : int

    Returns
    -------
    gate_up, down, gate_up_bias
        New arrays, of F rounded up: act(0) * 0 = 0 is what the new features are, and their columns
        of `down` are 0. The same arrays if F is a multiple already.

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

    def halves(array: Any) -> Any:
        wide = _zeros_like(array, (2, total, *array.shape[1:]))
        wide[:, :features] = _bits(array).reshape(2, features, *array.shape[1:])
        return wide.reshape(2 * total, *array.shape[1:]).view(array.dtype)

    columns = _zeros_like(down, (down.shape[0], total))
    columns[:, :features] = _bits(down)
    bias = None if gate_up_bias is None else halves(gate_up_bias)
    return halves(gate_up), columns.view(down.dtype), bias


def _bits(array: Any) -> Any:
    """Return the array as integers: CuPy cannot copy every dtype of ours by slices."""
    return array.view(f"u{array.itemsize}")


def _zeros_like(array: Any, shape: tuple[int, ...]) -> Any:
    return array_module(array).zeros(shape, f"u{array.itemsize}")
