"""`SandwichLayer`: norms before and after both branches, and a stream that each layer completes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from engine import kernels
from engine.layers.arrays import arrays_of
from engine.layers.attention import Attention
from engine.layers.batch import ForwardBatch
from engine.layers.mlp import MLP
from engine.layers.moe import DenseAndExperts
from engine.layers.norm import Norm
from engine.layers.per_layer_input import PerLayerGate

__all__ = ["SandwichLayer"]


class SandwichLayer:
    """A layer whose end needs the whole residual stream (Gemma 4).

    After attention and MLP, the layer adds what it makes of its per-layer input, and scales the
    stream; either may be missing. So it returns the stream complete, without a delta.

    Parameters
    ----------
    attn : Attention
    mlp : MLP or DenseAndExperts
    attn_norm, post_attn_norm, mlp_norm, post_mlp_norm : Norm
    per_layer : PerLayerGate, optional
    scale : (1,) array, optional
        Factor on the stream.
    """

    __slots__ = (
        *("attn", "attn_norm", "mlp", "mlp_norm", "per_layer", "post_attn_norm", "post_mlp_norm"),
        "scale",
    )

    def __init__(
        self,
        attn: Attention,
        mlp: MLP | DenseAndExperts,
        attn_norm: Norm,
        post_attn_norm: Norm,
        mlp_norm: Norm,
        post_mlp_norm: Norm,
        per_layer: PerLayerGate | None = None,
        scale: Any = None,
    ) -> None:
        self.attn = attn
        self.mlp = mlp
        self.attn_norm = attn_norm
        self.post_attn_norm = post_attn_norm
        self.mlp_norm = mlp_norm
        self.post_mlp_norm = post_mlp_norm
        self.per_layer = per_layer
        self.scale = scale

    def arrays(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, array) for every array of the layer."""
        yield from arrays_of(
            attn=self.attn,
            attn_norm=self.attn_norm,
            post_attn_norm=self.post_attn_norm,
            mlp=self.mlp,
            mlp_norm=self.mlp_norm,
            post_mlp_norm=self.post_mlp_norm,
            per_layer=self.per_layer,
        )
        if self.scale is not None:
            yield "scale", self.scale

    def __call__(
        self, delta: None, residual: Any, batch: ForwardBatch, caches: Any, rows: Any = None
    ) -> tuple[None, Any]:
        """Return (None, the stream after the layer), (T, N) or, with `rows`, (R, N).

        `caches` are the pages and, with `per_layer`, the layer's input (T, P). See `DecoderLayer`.
        """
        slots = batch.slot_mapping if rows is None else None
        pages, inputs = (caches, None) if self.per_layer is None else (caches[:-1], caches[-1])
        x = self.attn(self.attn_norm(residual), batch, *pages, rows=rows)
        if rows is not None:
            residual = kernels.embedding(rows, residual)
            inputs = None if inputs is None else kernels.embedding(rows, inputs)
        x = self.post_attn_norm(x, out=x)
        x, residual = self.mlp_norm.add_for(self.mlp.input_format, x, residual)
        if isinstance(self.mlp, DenseAndExperts):
            x = self.mlp(x, stream=residual, slots=slots)
        else:
            x = self.mlp(x, slots=slots)
        return None, self._end(self.post_mlp_norm(x, out=x), residual, inputs)

    def _end(self, x: Any, residual: Any, inputs: Any) -> Any:
        """Return the stream with the MLP's output `x` and the per-layer input, scaled."""
        if self.per_layer is not None:
            residual = kernels.residual_add(x, residual, out=residual)
            x = self.per_layer(residual, inputs)
        return kernels.residual_add(x, residual, scale=self.scale, out=residual)

    def is_fused(self, num_tokens: int) -> bool:
        """Tell that a layer called without delta returns none, for any number of tokens."""
        return True

    def can_plan(self, batch: ForwardBatch) -> bool:
        """Tell that a call launches only kernels, so that a launch plan can replay it."""
        return True
