"""Weights in the format in which a checkpoint stores them: codes and scales, not dequantized."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from engine.device import Device
from engine.loading.expert_rows import read_stored_rows, stored_format
from engine.loading.placement import Placement
from engine.loading.quantized.reader import QuantizedCheckpoint
from engine.loading.quantized.rows import QuantizedRows
from engine.loading.weight_memory import is_quantized
from engine.weights import Format, Weight
from engine.weights.formats import TILE_ROWS
from engine.weights.stack import stack_matrices

__all__ = ["StoredWeights", "stored_formats"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class StoredWeights:
    """Makes fused weights from quantized tensors.

    Attributes
    ----------
    device : Device
        Where the weights are put.
    checkpoint : QuantizedCheckpoint
    read_dense : callable
        ``read_dense(place)`` returns the rows in the model's dtype, on the device.
    order : callable
        ``order(place)`` returns the order in which the engine wants the rows, or None for the
        tensor's own (some checkpoints store rotated heads in another one).
    """

    device: Device
    checkpoint: QuantizedCheckpoint
    read_dense: Callable[[Placement], Any]
    order: Callable[[Placement], Array | None]

    def weight(self, placements: Iterable[Placement]) -> Weight:
        """Return the weight that these placements make up.

        Neighbouring parts in one format become one matrix; if several remain, as when v has another
        format than q and k, the weight is stacked.
        """
        parts: list[Weight] = []
        for places, rows in self._joined(placements):
            if rows is None:
                parts += [Weight.dense(self.read_dense(place)) for place in places]
            else:
                parts.append(self._on_device(rows))
        return parts[0] if len(parts) == 1 else Weight.stacked(parts)

    def experts(self, placements: Iterable[Placement], shape: tuple[int, ...]) -> Weight | None:
        """Return the matrices of all experts as one weight (E, N, K), or None.

        None if their formats or the orders of their columns are not all the same, or if packed
        matrices have rows that are no multiple of a tile's.
        """
        joined = list(self._joined(placements))
        rows = joined[0][1]
        if len(joined) > 1 or rows is None or rows.permutation is not None:
            return None
        num_experts, num_rows, _ = shape
        if rows.format.is_packed:
            whole = num_rows % TILE_ROWS == 0
            return replace(self._on_device(rows), shape=shape) if whole else None
        return stack_matrices(
            [
                self._on_device(rows.take(slice(first, first + num_rows)))
                for first in range(0, num_experts * num_rows, num_rows)
            ]
        )

    def _joined(
        self, placements: Iterable[Placement]
    ) -> Iterator[tuple[list[Placement], QuantizedRows | None]]:
        """Yield the parts in order, with neighbours joined that can be one matrix."""
        places: list[Placement] = []
        parts: list[QuantizedRows] = []
        for place in sorted(placements, key=lambda place: place.start):
            rows = self._rows(place)
            if parts and not (rows is not None and _can_join(parts[-1], rows)):
                yield places, QuantizedRows.concat(parts)
                places = []
                parts = []
            if rows is None:
                yield [place], None
            else:
                places.append(place)
                parts.append(rows)
        if parts:
            yield places, QuantizedRows.concat(parts)

    def _rows(self, place: Placement) -> QuantizedRows | None:
        rows = read_stored_rows(self.checkpoint, place)
        order = self.order(place)
        return rows if rows is None or order is None else rows.take(order)

    def _on_device(self, rows: QuantizedRows) -> Weight:
        if not self.device.is_cuda:
            return rows.to_weight()
        xp = self.device.xp
        if rows.format.is_packed:  # packed there, which takes a small part of the time
            names = ("codes", "scales", "offsets", "super_scales", "permutation")
            arrays = ((name, getattr(rows, name)) for name in names)
            return replace(
                rows, **{name: xp.asarray(a) for name, a in arrays if a is not None}
            ).to_weight()
        weight = rows.to_weight()
        return replace(weight, data=xp.asarray(weight.data), scales=xp.asarray(weight.scales))


def stored_formats(
    checkpoint: QuantizedCheckpoint,
    placements: Iterable[Placement],
    keeps: Callable[[str, Format], bool],
    *,
    is_tied: bool,
) -> dict[str, Format]:
    """Return the formats of the fused weights that are kept as a checkpoint stores them.

    Of weights with parts in several formats it is that of the first part. If the output layer is
    tied (`is_tied`), it is kept in the format of the embedding, beside the embedding's numbers.
    """
    formats: dict[str, Format] = {}
    for place in placements:
        form = stored_format(checkpoint, place)
        if form is None or not keeps(str(place.target), form) or _cuts_groups(place, form):
            continue
        if is_quantized(str(place.target)) or place.target.kind == "lm_head":
            formats.setdefault(str(place.target), form)
        elif is_tied and place.target.kind == "embed":
            formats.setdefault("lm_head", form)
    return formats


def _cuts_groups(place: Placement, form: Format) -> bool:
    """Tell whether the columns of a shard begin or end inside a group that shares a scale."""
    group = form.super_block or form.group
    return place.columns is not None and group > 0 and any(c % group for c in place.columns)


def _can_join(first: QuantizedRows, second: QuantizedRows) -> bool:
    """Tell whether the rows of both can be one matrix."""
    if first.format != second.format or not _has_whole_blocks(first.format, first.shape[0]):
        return False
    if first.permutation is None or second.permutation is None:
        return first.permutation is second.permutation
    return np.array_equal(first.permutation, second.permutation)


def _has_whole_blocks(form: Format, rows: int) -> bool:
    """Tell whether a matrix of so many rows ends with a whole block of scales."""
    return form.block is None or form.block[0] <= 1 or rows % form.block[0] == 0
