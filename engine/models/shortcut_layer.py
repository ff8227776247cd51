"""`ShortcutLayer`: two attentions, each with an MLP, and experts beside them (LongCat Flash)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from engine import kernels
from engine.layers.arrays import arrays_of
from engine.layers.batch import ForwardBatch
from engine.layers.mla import Mla
from engine.layers.mlp import MLP
from engine.layers.moe import MoE
from engine.layers.norm import Norm

__all__ = ["AttentionAndMlp", "ShortcutLayer"]


class AttentionAndMlp:
    """Half of a layer: attention and MLP, each behind its norm.

    Parameters
    ----------
    attn : Mla
    mlp : MLP
    attn_norm, mlp_norm : Norm
    """

    __slots__ = ("attn", "attn_norm", "mlp", "mlp_norm")

    def __init__(self, attn: Mla, mlp: MLP, attn_norm: Norm, mlp_norm: Norm) -> None:
        self.attn = attn
        self.mlp = mlp
        self.attn_norm = attn_norm
        self.mlp_norm = mlp_norm

    def arrays(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, array) for every array."""
        yield from arrays_of(
            attn=self.attn, mlp=self.mlp, attn_norm=self.attn_norm, mlp_norm=self.mlp_norm
        )


class ShortcutLayer:
    """Two halves in a row; experts read what the first MLP reads.

    Their output is added at the end of the layer: nothing before depends on it, so that ranks may
    exchange tokens and outputs of experts meanwhile.

    Parameters
    ----------
    first, second : AttentionAndMlp
    mlp : MoE

    References
    ----------
    Meituan LongCat Team: LongCat-Flash technical report, arXiv:2509.01322, section 2.
    """

    __slots__ = ("first", "mlp", "second")

    def __init__(self, first: AttentionAndMlp, second: AttentionAndMlp, mlp: MoE) -> None:
        self.first = first
        self.second = second
        self.mlp = mlp

    @property
    def attn(self) -> Mla:
        """The last attention: after it, tokens without logits may be dropped."""
        return self.second.attn

    def arrays(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, array) for every array of the layer."""
        yield from arrays_of(first=self.first, second=self.second, mlp=self.mlp)

    def __call__(
        self, delta: Any, residual: Any, batch: ForwardBatch, pages: Any, rows: Any = None
    ) -> tuple[Any, Any]:
        """Return (delta, residual) after the layer; `pages` are those of both attentions.

        See `DecoderLayer`.
        """
        first = self.first
        second = self.second
        if delta is None:
            x = first.attn_norm(residual)
        else:
            x, residual = first.attn_norm.add_for(first.attn.input_format, delta, residual)
        x = first.attn(x, batch, pages[0])
        x, residual = first.mlp_norm.add(x, residual)
        y = self.mlp(x, slots=batch.slot_mapping)
        x, residual = second.attn_norm.add_for(second.attn.input_format, first.mlp(x), residual)
        x = second.attn(x, batch, pages[1], rows=rows)
        if rows is not None:
            y = kernels.embedding(rows, y)
            residual = kernels.embedding(rows, residual)
        x, residual = second.mlp_norm.add_for(second.mlp.input_format, x, residual)
        return kernels.residual_add(second.mlp(x), y, out=y), residual

    def is_fused(self, num_tokens: int) -> bool:
        """Tell that a layer called without delta returns one."""
        return False

    def can_plan(self, batch: ForwardBatch) -> bool:
        """Tell whether a call launches only kernels, so that a launch plan can replay it."""
        return self.second.attn.can_plan(batch)
