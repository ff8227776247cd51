"""Alternating updates (Gemma 3n): S residual streams, of which the layers compute the first.

A layer predicts all streams from all of them, computes its result for the first one, and corrects
every stream by the difference. Streams are the parts of rows (T, S·N).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from engine import kernels
from engine.device import array_module, empty_like
from engine.layers.arrays import arrays_of
from engine.layers.linear import Linear
from engine.layers.norm import Norm

__all__ = ["AltUp", "AltUpStreams", "Laurel"]


class AltUpStreams:
    """Entry and exit of the streams: projections of the embedding, and the mean at the end.

    Parameters
    ----------
    entries, exits : sequence of Linear
        (N, N) each, one for every stream but the first.
    """

    __slots__ = ("entries", "exits", "share")

    def __init__(self, entries: Sequence[Linear], exits: Sequence[Linear]) -> None:
        self.entries = tuple(entries)
        self.exits = tuple(exits)
        weight = self.exits[0].weight.data
        share = np.array([1 / (len(self.exits) + 1)], weight.dtype)
        self.share = array_module(weight).asarray(share)

    def enter(self, x: Any) -> Any:
        """Return the streams (T, S·N) of embeddings `x` (T, N): x and its projections."""
        count = len(self.entries) + 1
        n = x.shape[1]
        streams = empty_like(x, shape=(x.shape[0], count * n))
        streams[:, :n] = x
        for stream, linear in enumerate(self.entries, start=1):
            part = streams[:, stream * n : (stream + 1) * n]
            kernels.match_rms(linear(x), x, out=part)
        return streams

    def leave(self, delta: Any, streams: Any) -> Any:
        """Return the mean (R, N) of the streams' projections; `delta` is the last layer's."""
        count = len(self.exits) + 1
        n = streams.shape[1] // count
        xp = array_module(streams)
        own = [xp.ascontiguousarray(streams[:, i * n : (i + 1) * n]) for i in range(count)]
        for stream in own[1:]:
            kernels.residual_add(delta, stream, out=stream)
        total = own[0].copy()
        for stream, linear in enumerate(self.exits, start=1):
            part = kernels.match_rms(linear(own[stream]), own[0])
            scale = self.share if stream == count - 1 else None
            kernels.residual_add(part, total, scale=scale, out=total)
        return total


class AltUp:
    """One layer's prediction and correction of the streams.

    Parameters
    ----------
    norm : Norm
        Norm of the router's input.
    router : (S, N) array
    prediction : (S·S, S) array
    correction : (S, S) array
    scale : (N,) array or None
        Factor on the corrected first stream that `correct` returns.
    """

    __slots__ = ("correction", "norm", "prediction", "router", "scale")

    def __init__(
        self, norm: Norm, router: Any, prediction: Any, correction: Any, scale: Any
    ) -> None:
        self.norm = norm
        self.router = router
        self.prediction = prediction
        self.correction = correction
        self.scale = scale

    def arrays(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, array) for every array."""
        yield from arrays_of(norm=self.norm)
        yield "router", self.router
        yield "prediction", self.prediction
        yield "correction", self.correction
        if self.scale is not None:
            yield "scale", self.scale

    def predict(self, streams: Any, delta: Any) -> Any:
        """Predict `streams` (T, S·N) in place; return the first one's prediction (T, N).

        `delta` (T, N) or None is first added to all other streams.
        """
        router = (self.norm.weight, self.router, self.prediction)
        return kernels.altup_predict(self._split(streams), *router, delta=delta, eps=self.norm.eps)

    def correct(self, streams: Any, x: Any) -> Any:
        """Correct `streams` in place by the result `x` (T, N); return the first one, scaled."""
        router = (self.norm.weight, self.router, self.correction)
        return kernels.altup_correct(
            self._split(streams), x, *router, scale=self.scale, eps=self.norm.eps
        )

    def _split(self, streams: Any) -> Any:
        return streams.reshape(streams.shape[0], *self.router.shape)


class Laurel:
    """A learned low-rank branch beside attention: x + norm(right left x).

    Parameters
    ----------
    left : Linear
        (R, N).
    right : Linear
        (N, R).
    norm : Norm
    """

    __slots__ = ("left", "norm", "right")

    def __init__(self, left: Linear, right: Linear, norm: Norm) -> None:
        self.left = left
        self.right = right
        self.norm = norm

    def arrays(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, array) for every array."""
        yield from arrays_of(left=self.left, right=self.right, norm=self.norm)

    def __call__(self, x: Any) -> Any:
        """Return the branch's output (T, N) for `x` (T, N)."""
        y = self.right(self.left(x))
        y = self.norm(y, out=y)
        return kernels.residual_add(y, x, out=y)
