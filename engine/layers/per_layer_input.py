"""Per-layer inputs (Gemma 3n, Gemma 4): a second embedding, of which each layer reads its own part.

A token's row of the second table, plus a projection of its embedding, gives P features to every
layer. The layer multiplies them by a gate, projects them back, and adds them to its output.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from engine import kernels
from engine.device import array_module
from engine.layers.arrays import arrays_of
from engine.layers.embedding import Embedding
from engine.layers.linear import Linear
from engine.layers.mlp import gated
from engine.layers.norm import Norm

__all__ = ["PerLayerGate", "PerLayerInput"]


class PerLayerInput:
    """The P features of every token and layer: (norm(W x) + row of the table) / sqrt(2).

    Parameters
    ----------
    table : Embedding
        (Vp, L·P). Tokens from Vp on read row 0.
    projection : Linear
        (L·P, N).
    norm : Norm
        (P,).
    """

    __slots__ = ("norm", "projection", "scale", "table")

    def __init__(self, table: Embedding, projection: Linear, norm: Norm) -> None:
        self.table = table
        self.projection = projection
        # The projection is scaled by N^-0.5 before the norm, which changes only the norm's epsilon.
        self.norm = Norm(norm.weight, norm.eps * projection.weight.shape[1])
        scale = np.array([math.sqrt(0.5)], norm.weight.dtype)
        self.scale = array_module(norm.weight).asarray(scale)

    def __call__(self, token_ids: Any, x: Any, vocab_size: int) -> Any:
        """Return the features (T, L, P) of `token_ids` (T,), whose embeddings are `x` (T, N).

        `vocab_size` is V: ids are below it.
        """
        num_rows = self.table.weight.shape[0]
        if vocab_size > num_rows:
            token_ids = array_module(x).where(token_ids < num_rows, token_ids, 0)
        rows = self.table(token_ids)
        context = self.projection(x).reshape(-1, self.norm.weight.shape[0])
        context = self.norm(context, out=context).reshape(rows.shape)
        total = kernels.residual_add(context, rows, scale=self.scale, out=rows)
        return total.reshape(x.shape[0], -1, self.norm.weight.shape[0])


class PerLayerGate:
    """A layer's use of its input p: norm(W2 (act(W1 h) * p)), to be added to h.

    Parameters
    ----------
    gate : Linear
        W1, (P, N).
    output : Linear
        W2, (N, P).
    norm : Norm
        (N,).
    activation : str
        act: "silu", "gelu" (erf) or "gelu_tanh".
    """

    __slots__ = ("activation", "gate", "norm", "output")

    def __init__(
        self, gate: Linear, output: Linear, norm: Norm, activation: str = "gelu_tanh"
    ) -> None:
        self.gate = gate
        self.output = output
        self.norm = norm
        self.activation = activation

    def arrays(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, array) for every array."""
        yield from arrays_of(gate=self.gate, output=self.output, norm=self.norm)

    def __call__(self, h: Any, p: Any) -> Any:
        """Return the layer's addition (T, N) to `h` (T, N), for its input `p` (T, P)."""
        gate = self.gate(h)
        y = self.output(gated(self.activation, gate, p, gate))
        return self.norm(y, out=y)
