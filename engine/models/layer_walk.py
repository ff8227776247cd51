"""A walk over a decoder's layers that works each kind of layer out once.

On a GPU the layers of one kind launch the same kernels, for one step, with the same numbers; only
addresses differ. So the first of them is called and recorded, and the others are its replay
(`kernels/_replay.py`): a step of 28 layers takes the host about 4 ms instead of 24. A last layer
that some tokens leave is called, too.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from engine.device import is_cupy_array
from engine.kernels._replay import Recording, record
from engine.layers.batch import ForwardBatch

__all__ = ["LayerWalk", "layer_arrays"]

_ALIGNMENT = 16  # bytes: no kernel is chosen by more


def layer_arrays(part: Any, name: str = "") -> list[tuple[str, Any]]:
    """Return every CuPy array that a layer, or a part of one, holds, by where it is held.

    Examples
    --------
    >>> import numpy as np
    >>> from engine.layers.norm import Norm
    >>> layer_arrays(Norm(np.ones(4), 1e-6))  # a NumPy array
    []
    """
    if is_cupy_array(part):
        return [(name, part)]
    if isinstance(part, tuple | list):
        held: dict[str, Any] = {str(index): item for index, item in enumerate(part)}
    elif isinstance(part, dict):
        held = {str(key): item for key, item in part.items()}
    elif type(part).__module__.startswith("engine."):
        slots = [slot for kind in type(part).__mro__ for slot in _slots(kind)]
        slots += getattr(part, "__dict__", ())
        held = {slot: getattr(part, slot) for slot in slots if hasattr(part, slot)}
    else:
        return []
    found = []
    for key, item in held.items():
        found += layer_arrays(item, f"{name}.{key}")
    return found


def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


@dataclass
class _Recorded:
    """One layer's launches, and the array in which it leaves what is to be added."""

    recording: Recording
    deltas: tuple[Any, Any]  # what came in, what went out
    residual: Any

    def replay(self, pointers: list[int], delta: Any) -> tuple[Any, Any]:
        """Make another layer's launches; return its (delta, residual)."""
        if delta is not None:
            # What went out of the layer before is read until the end of this one.
            out = self.deltas[1 if delta is not self.deltas[1] else 0]
            pointers = [*pointers, int(delta.data.ptr), int(out.data.ptr)]
            delta = out
        self.recording.replay(pointers)
        return delta, self.residual


class LayerWalk:
    """Calls layers in their order, or replays them.

    Parameters
    ----------
    layers : sequence of DecoderLayer
    numbers : sequence of hashable
        What each layer computes with beside its arrays: layers that agree are of one kind.
    """

    def __init__(self, layers: Sequence[Any], numbers: Sequence[Hashable]) -> None:
        self._layers = tuple(layers)
        held = [layer_arrays(layer) for layer in layers]
        self._pointers = [[int(a.data.ptr) for _, a in arrays] for arrays in held]
        self._sizes = [[int(a.nbytes) for _, a in arrays] for arrays in held]
        self._kinds = [
            (number, tuple((name, *_layout(array)) for name, array in arrays))
            for number, arrays in zip(numbers, held, strict=True)
        ]
        self._last = {kind: index for index, kind in enumerate(self._kinds)}

    def __call__(
        self,
        residual: Any,
        batch: ForwardBatch,
        kv_pages: Sequence[tuple[Any, Any]],
        rows: Any = None,
    ) -> tuple[Any, Any]:
        """Return (delta, residual) of the last layer, of a residual stream that is overwritten.

        With `rows` (R,) int32, those of these tokens only: the others leave within the last layer.
        """
        if rows is None:
            return self._walk(self._layers, residual, batch, kv_pages)
        # The recordings are gone when the last layer is called: what they held is memory for it.
        delta, residual = self._walk(self._layers[:-1], residual, batch, kv_pages[:-1])
        called: tuple[Any, Any] = self._layers[-1](delta, residual, batch, kv_pages[-1], rows)
        return called

    def _walk(
        self,
        layers: Sequence[Any],
        residual: Any,
        batch: ForwardBatch,
        kv_pages: Sequence[tuple[Any, Any]],
    ) -> tuple[Any, Any]:
        """Call or replay the first `layers`."""
        delta = None
        recorded: dict[Hashable, _Recorded | None] = {}
        for index, (layer, pages) in enumerate(zip(layers, kv_pages, strict=True)):
            kind = self._kinds[index], delta is None
            known = recorded.get(kind)
            if known is not None and residual is known.residual:
                pointers = self._pointers[index] + [int(page.data.ptr) for page in pages]
                delta, residual = known.replay(pointers, delta)
            elif self._is_worth_it(index, delta, batch) and kind not in recorded:
                delta, residual, recorded[kind] = self._record(index, delta, residual, batch, pages)
            else:
                delta, residual = layer(delta, residual, batch, pages)
        return delta, residual

    def _is_worth_it(self, index: int, delta: Any, batch: ForwardBatch) -> bool:
        """Tell whether a layer is followed by one of its kind that begins as it does."""
        is_alike = delta is not None or self._layers[index].is_fused(batch.num_tokens)
        return bool(self._pointers[index]) and is_alike and self._last[self._kinds[index]] > index

    def _record(
        self, index: int, delta: Any, residual: Any, batch: ForwardBatch, pages: tuple[Any, Any]
    ) -> tuple[Any, Any, _Recorded | None]:
        with record() as recording:
            out, new_residual = self._layers[index](delta, residual, batch, pages)
        moving = list(zip(self._pointers[index], self._sizes[index], strict=True))
        moving += [(int(page.data.ptr), int(page.nbytes)) for page in pages]
        is_alike = (out is None) == (delta is None) and new_residual.data.ptr == residual.data.ptr
        if delta is not None and out is not None:
            moving += [(int(a.data.ptr), int(a.nbytes)) for a in (delta, out)]
        found = None
        if is_alike and recording.bind(moving):
            found = _Recorded(recording, (delta, out), new_residual)
        return out, new_residual, found


def _layout(array: Any) -> tuple[Any, ...]:
    """Return what kernels are chosen by: all of an array but where it is."""
    return array.shape, array.strides, array.dtype, int(array.data.ptr) % _ALIGNMENT
