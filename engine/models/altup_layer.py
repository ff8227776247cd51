"""`AltUpLayer`: a layer between several residual streams (Gemma 3n)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from engine import kernels
from engine.device import array_module
from engine.errors import ConfigError
from engine.layers.altup import AltUp, Laurel
from engine.layers.arrays import arrays_of
from engine.layers.attention import Attention
from engine.layers.batch import ForwardBatch
from engine.layers.mlp import MLP
from engine.layers.norm import Norm
from engine.layers.per_layer_input import PerLayerGate

__all__ = ["AltUpLayer"]


class AltUpLayer:
    """Attention, a low-rank branch and MLP, which compute the first of several residual streams.

    The residual stream is (T, S·N), and `delta` (T, N) is added to all streams but the first.

    Parameters
    ----------
    altup : AltUp
    attn : Attention
    laurel : Laurel
    mlp : MLP
    attn_norm, post_attn_norm, mlp_norm, post_mlp_norm : Norm
    per_layer : PerLayerGate
    """

    __slots__ = (
        *("altup", "attn", "attn_norm", "laurel", "mlp", "mlp_norm", "per_layer"),
        *("post_attn_norm", "post_mlp_norm", "root_half"),
    )

    def __init__(
        self,
        altup: AltUp,
        attn: Attention,
        laurel: Laurel,
        mlp: MLP,
        attn_norm: Norm,
        post_attn_norm: Norm,
        mlp_norm: Norm,
        post_mlp_norm: Norm,
        per_layer: PerLayerGate | None,
    ) -> None:
        self.altup = altup
        self.attn = attn
        self.laurel = laurel
        self.mlp = mlp
        self.attn_norm = attn_norm
        self.post_attn_norm = post_attn_norm
        self.mlp_norm = mlp_norm
        self.post_mlp_norm = post_mlp_norm
        if per_layer is None:
            raise ConfigError("per_layer_input must be given with altup; got None")
        self.per_layer = per_layer
        weight = attn_norm.weight
        self.root_half = array_module(weight).asarray(np.array([math.sqrt(0.5)], weight.dtype))

    def arrays(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, array) for every array of the layer."""
        yield from arrays_of(
            altup=self.altup,
            attn=self.attn,
            laurel=self.laurel,
            mlp=self.mlp,
            attn_norm=self.attn_norm,
            post_attn_norm=self.post_attn_norm,
            mlp_norm=self.mlp_norm,
            post_mlp_norm=self.post_mlp_norm,
            per_layer=self.per_layer,
        )
        yield "root_half", self.root_half

    def __call__(
        self, delta: Any, residual: Any, batch: ForwardBatch, caches: Any, rows: Any = None
    ) -> tuple[Any, Any]:
        """Return (delta, streams) after the layer. See `DecoderLayer`.

        `caches` are the pages and the layer's input (T, P).
        """
        *pages, inputs = caches
        own = self.altup.predict(residual, delta)
        given = self.attn_norm(own)
        x = self.attn(given, batch, *pages, rows=rows)
        if rows is not None:
            gathered = (kernels.embedding(rows, a) for a in (residual, own, given, inputs))
            residual, own, given, inputs = gathered
        x = self.post_attn_norm(x, out=x)
        x = kernels.residual_add(x, own, out=x)
        x = kernels.residual_add(self.laurel(given), x, scale=self.root_half, out=x)
        y = self.mlp(self.mlp_norm(x))
        y = self.post_mlp_norm(y, out=y)
        x = kernels.residual_add(y, x, out=x)
        own = self.altup.correct(residual, x)
        return self.per_layer(own, inputs), residual

    def is_fused(self, num_tokens: int) -> bool:
        """Tell that a layer called without delta returns one."""
        return False

    def can_plan(self, batch: ForwardBatch) -> bool:
        """Tell that a call launches only kernels, so that a launch plan can replay it."""
        return True
