"""`Mixer`: what a decoder layer asks of attention, or of a kind that replaces it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from engine import kernels
from engine.layers.arrays import arrays_of
from engine.layers.batch import ForwardBatch
from engine.layers.linear import Linear
from engine.layers.mlp import MLP
from engine.layers.moe import MoE
from engine.layers.norm import Norm
from engine.weights import Format

__all__ = ["FeedForward", "JointMixer", "Mixer", "state_places"]


class Mixer(Protocol):
    """The part of a layer that mixes tokens of a sequence.

    Attributes
    ----------
    o : Linear
        The output projection.
    """

    o: Linear

    @property
    def input_format(self) -> Format | None:
        """Format of the weight that multiplies the input: a norm may quantize its output for it."""

    def arrays(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, array) for every array of the layer."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Return the output (T, N) for ``(x, batch, *caches)``, and update the layer's caches.

        x : (T, N) array or QuantizedRows
        batch : ForwardBatch
        caches : arrays
            What the layer keeps of each sequence: pages, or states. See `cache.layer_cache`.
        norm : Norm, optional
            The input is ``norm(x)``.
        residual : (T, N) array, optional
            It may be `x`; the output is added to it.
        rows : (R,) int32 array, optional
            Only these tokens are passed to the output projection: (R, N).
        """


def state_places(batch: ForwardBatch) -> dict[str, Any]:
    """Return where the sequences of a batch read and write states: keywords of recurrent ops."""
    return {
        "cu_seqlens_q": batch.cu_seqlens_q,
        "context_lens": batch.context_lens,
        "state_slots": batch.state_slots,
        "state_targets": batch.state_targets,
        "snapshot_slots": batch.snapshot_slots,
        "snapshot_offsets": batch.snapshot_offsets,
    }


class JointMixer:
    """Attention and a recurrent mixer that read the same input; their outputs are added.

    Parameters
    ----------
    attn, recurrent : Mixer
    """

    __slots__ = ("attn", "o", "recurrent")

    def __init__(self, attn: Mixer, recurrent: Mixer) -> None:
        self.attn = attn
        self.recurrent = recurrent
        self.o = attn.o

    @property
    def input_format(self) -> Format | None:
        """Format of the weights that multiply the input, if it is the same one."""
        form = self.attn.input_format
        return form if form == self.recurrent.input_format else None

    def arrays(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, array) for every array of the mixers."""
        yield from arrays_of(attn=self.attn, recurrent=self.recurrent)

    def __call__(
        self,
        x: Any,
        batch: ForwardBatch,
        k_pages: Any,
        v_pages: Any,
        *states: Any,
        norm: Norm | None = None,
        residual: Any = None,
        rows: Any = None,
    ) -> Any:
        """Return the output (T, N) for `x` (T, N). See `Mixer`."""
        if norm is not None:
            x = norm(x)
        other = self.recurrent(x, batch, *states, rows=rows)
        y = self.attn(x, batch, k_pages, v_pages, residual=residual, rows=rows)
        return kernels.residual_add(other, y, out=y)


class FeedForward:
    """An MLP or experts in the place of attention, in a layer that has one branch only.

    Parameters
    ----------
    mlp : MLP or MoE
    """

    __slots__ = ("mlp", "o")

    def __init__(self, mlp: MLP | MoE) -> None:
        self.mlp = mlp
        self.o = mlp.down if isinstance(mlp, MLP) else mlp.router

    @property
    def input_format(self) -> Format | None:
        """Format of the weight that multiplies the input."""
        return self.mlp.input_format

    def arrays(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, array) for every array of the branch."""
        return self.mlp.arrays()

    def __call__(
        self,
        x: Any,
        batch: ForwardBatch,
        *,
        norm: Norm | None = None,
        residual: Any = None,
        rows: Any = None,
    ) -> Any:
        """Return the output (T, N) for `x` (T, N). See `Mixer`."""
        y = self.mlp(x, norm=norm, residual=residual, slots=batch.slot_mapping)
        return y if rows is None else kernels.embedding(rows, y)
