"""Gated short convolution: LFM2's layers without attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from engine import kernels
from engine.layers.arrays import arrays_of
from engine.layers.batch import ForwardBatch
from engine.layers.linear import Linear
from engine.layers.mixer import state_places
from engine.layers.norm import Norm
from engine.weights import Format

__all__ = ["ShortConv"]


class ShortConv:
    """One layer's gated short convolution: y = o(c * conv(b * x)).

    Parameters
    ----------
    in_proj : Linear
        (3C, N): the rows of b, c and x.
    taps : (C, conv_size) array
        Taps of every channel.
    o : Linear
        Output projection (N, C).
    bias : (C,) array, optional
        Bias of the convolution.

    References
    ----------
    Liquid AI: LFM2 technical report, arXiv:2511.23404.
    """

    __slots__ = ("bias", "in_proj", "o", "taps")

    def __init__(self, in_proj: Linear, taps: Any, o: Linear, bias: Any = None) -> None:
        self.in_proj = in_proj
        self.taps = taps
        self.o = o
        self.bias = bias

    @property
    def input_format(self) -> Format | None:
        """Format of the weight that multiplies the input."""
        return self.in_proj.input_format

    def arrays(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, array) for every array of the layer."""
        yield "taps", self.taps
        if self.bias is not None:
            yield "bias", self.bias
        yield from arrays_of(in_proj=self.in_proj, o=self.o)

    def __call__(
        self,
        x: Any,
        batch: ForwardBatch,
        states: Any,
        *,
        norm: Norm | None = None,
        residual: Any = None,
        rows: Any = None,
    ) -> Any:
        """Update the states, and return the output (T, N) for `x` (T, N). See `Mixer`.

        `states` (S, conv_size - 1, C) holds the last inputs of the convolution in each of S slots.
        """
        projected = self.in_proj(x) if norm is None else self.in_proj.of_normed(x, norm)
        channels = self.taps.shape[0]
        mixed = kernels.causal_conv(
            projected[:, 2 * channels :],
            self.taps,
            states=states,
            bias=self.bias,
            in_gate=projected[:, :channels],
            out_gate=projected[:, channels : 2 * channels],
            **state_places(batch),
        )
        if rows is not None:
            mixed = kernels.embedding(rows, mixed)
        return self.o(mixed, residual=residual)
