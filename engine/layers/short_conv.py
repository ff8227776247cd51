"""Gated short convolution: LFM2's layers without attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from engine import kernels
from engine.config import ShortConvConfig
from engine.device import array_module
from engine.layers.arrays import arrays_of
from engine.layers.batch import ForwardBatch
from engine.layers.linear import Linear
from engine.layers.mixer import state_places
from engine.layers.norm import Norm
from engine.weights import Format

__all__ = ["ShortConv"]


class ShortConv:
    """One layer's gated short convolution: y = o(c * conv(b * x)).

    Beyond 4 taps, `kernels.causal_conv` computes it as the sum of two convolutions: of the newest
    inputs, and of the older ones, which a third convolution delays. See
    `ShortConvConfig.convolutions`.

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

    __slots__ = ("_all_taps", "bias", "delay", "in_proj", "o", "older", "taps")

    def __init__(self, in_proj: Linear, taps: Any, o: Linear, bias: Any = None) -> None:
        self.in_proj = in_proj
        self.taps = self._all_taps = taps
        self.o = o
        self.bias = bias
        self.older: Any = None
        self.delay: Any = None
        sizes = ShortConvConfig(*taps.shape).convolutions
        if len(sizes) > 1:
            xp = array_module(taps)
            self.delay = xp.zeros((len(taps), sizes[0]), taps.dtype)
            self.delay[:, 0] = 1
            self.older = xp.ascontiguousarray(taps[:, : sizes[1]])
            self.taps = xp.ascontiguousarray(taps[:, sizes[1] :])

    def refresh(self) -> None:
        """Take new values of the taps, which have been overwritten."""
        if self.older is not None:
            num_older = self.older.shape[1]
            self.older[...] = self._all_taps[:, :num_older]
            self.taps[...] = self._all_taps[:, num_older:]

    @property
    def input_format(self) -> Format | None:
        """Format of the weight that multiplies the input."""
        return self.in_proj.input_format

    def arrays(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, array) for every array of the layer."""
        for name in ("taps", "older", "delay", "bias"):
            if (array := getattr(self, name)) is not None:
                yield name, array
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

        `states` (S, R, C) holds the last inputs of each convolution in each of S slots.
        """
        projected = self.in_proj(x) if norm is None else self.in_proj.of_normed(x, norm)
        mixed = self._mixed(projected, states, state_places(batch))
        if rows is not None:
            mixed = kernels.embedding(rows, mixed)
        return self.o(mixed, residual=residual)

    def _mixed(self, projected: Any, states: Any, places: dict[str, Any]) -> Any:
        """Return c * conv(b * x) (T, C) for the rows (T, 3C) of b, c and x."""
        channels = self.taps.shape[0]
        x = projected[:, 2 * channels :]
        b = projected[:, :channels]
        c = projected[:, channels : 2 * channels]
        options = {"bias": self.bias, "in_gate": b, "out_gate": c, **places}
        if self.older is None:
            return kernels.causal_conv(x, self.taps, states=states, **options)
        first = self.delay.shape[1] - 1
        last = first + self.older.shape[1] - 1
        delayed = kernels.causal_conv(x, self.delay, states=states[:, :first], in_gate=b, **places)
        rows = states[:, first:last]
        older = kernels.causal_conv(delayed, self.older, states=rows, out_gate=c, **places)
        newer = kernels.causal_conv(x, self.taps, states=states[:, last:], **options)
        return kernels.residual_add(older, newer, out=newer)
