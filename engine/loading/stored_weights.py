"""Weights kept in the checkpoint's format, as codes and scales."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from engine.device import Device
from engine.kernels._cpu.panels import panel_min_bits
from engine.loading.quantized.rows import QuantizedRows
from engine.loading.tensor_reader import TensorReader
from engine.loading.weight_memory import is_quantized
from engine.loading.weight_table import Placement
from engine.weights import Format, Weight
from engine.weights.formats import TILE_ROWS
from engine.weights.stack import stack_matrices

__all__ = ["StoredWeights", "stored_formats"]


@dataclass(frozen=True)
class StoredWeights:
    """Builder of fused weights from quantized tensors.

    Attributes
    ----------
    reader : TensorReader
    device : Device
        Device that holds the weights.
    dtype : str
        Model dtype, used for unquantized tensors.
    """

    reader: TensorReader
    device: Device
    dtype: str

    def build(self, placements: Sequence[Placement], shape: tuple[int, ...]) -> Weight:
        """Return the weight made of the placements, in the formats of their tensors.

        Experts are dequantized if no kernel can multiply them as stored.
        """
        if len(shape) == 2:
            return self._matrix(placements)
        weight = self._experts(placements, shape)
        if weight is not None:
            return weight
        rows = [self._dense(place) for place in sorted(placements, key=lambda p: p.start)]
        return Weight.dense(self.device.xp.concatenate(rows).reshape(shape))

    def _matrix(self, placements: Iterable[Placement]) -> Weight:
        """Return a weight (N, K).

        Neighbouring parts of equal format are merged. If several remain, for example because v has
        another format than q and k, the weight is stacked.
        """
        parts: list[Weight] = []
        for is_dense, group in itertools.groupby(self._joined(placements), _is_dense):
            if is_dense:
                rows = [self._dense(place) for places, _ in group for place in places]
                parts.append(Weight.dense(self.device.xp.concatenate(rows)))
            else:
                parts += [
                    self._for_product(rows, places[0].name)
                    for places, rows in group
                    if rows is not None
                ]
        return parts[0] if len(parts) == 1 else Weight.stacked(parts)

    def _experts(self, placements: Iterable[Placement], shape: tuple[int, ...]) -> Weight | None:
        """Return all experts' matrices as one weight (E, N, K), or None.

        None if experts differ in format or column order, or if rows of packed matrices do not fill
        whole tiles.
        """
        joined = list(self._joined(placements))
        places, rows = joined[0]
        if len(joined) > 1 or rows is None or rows.permutation is not None:
            return None
        num_experts, num_rows, _ = shape
        if rows.format.is_packed:
            whole = num_rows % TILE_ROWS == 0
            return replace(self._on_device(rows, places[0].name), shape=shape) if whole else None
        return stack_matrices(
            [
                self._on_device(rows.take(slice(first, first + num_rows)), places[0].name)
                for first in range(0, num_experts * num_rows, num_rows)
            ]
        )

    def _joined(
        self, placements: Iterable[Placement]
    ) -> Iterator[tuple[list[Placement], QuantizedRows | None]]:
        """Yield the parts in order, merging compatible neighbours."""
        places: list[Placement] = []
        parts: list[QuantizedRows] = []
        for place in sorted(placements, key=lambda place: place.start):
            rows = self.reader.stored_rows(place)
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

    def _dense(self, place: Placement) -> Any:
        return self.device.xp.asarray(self.reader.dense_rows(place, self.dtype))

    def _for_product(self, rows: QuantizedRows, name: str) -> Weight:
        """Return a matrix on the device; on the CPU packed rows become panels, or dense."""
        if self.device.is_cuda or not rows.format.is_packed:
            return self._on_device(rows, name)
        if not rows.fits_panels:
            return Weight.dense(rows.numbers())
        return rows.to_panels(panel_min_bits())

    def _on_device(self, rows: QuantizedRows, name: str) -> Weight:
        name = f"{self.reader.checkpoint.path}: tensor {name!r}"
        if not self.device.is_cuda:
            return rows.to_weight(name)
        xp = self.device.xp
        if rows.format.is_packed:  # packing is far faster on the device
            names = ("codes", "scales", "offsets", "super_scales", "permutation")
            arrays = ((name, getattr(rows, name)) for name in names)
            return replace(
                rows, **{name: xp.asarray(a) for name, a in arrays if a is not None}
            ).to_weight()
        weight = rows.to_weight(name)
        return replace(weight, data=xp.asarray(weight.data), scales=xp.asarray(weight.scales))


def _is_dense(joined: tuple[list[Placement], QuantizedRows | None]) -> bool:
    """Tell whether parts, as `_joined` yields them, are not quantized."""
    return joined[1] is None


def stored_formats(
    reader: TensorReader,
    placements: Iterable[Placement],
    keeps: Callable[[str, Format], bool],
    *,
    is_tied: bool,
) -> dict[str, Format]:
    """Return the format of each fused weight kept as stored in the checkpoint.

    If a weight's parts differ in format, the first part's is returned. A tied output layer
    (`is_tied`) gets the stored format of the embedding, while the embedding is dequantized.
    """
    formats: dict[str, Format] = {}
    for place in placements:
        form = reader.stored_format(place)
        if form is None or not keeps(str(place.target), form) or _cuts_groups(place, form):
            continue
        if is_quantized(str(place.target)) or place.target.kind == "lm_head":
            formats.setdefault(str(place.target), form)
        elif is_tied and place.target.kind == "embed":
            formats.setdefault("lm_head", form)
    return formats


def _cuts_groups(place: Placement, form: Format) -> bool:
    """Tell whether a shard's columns begin or end inside a scale group."""
    group = form.super_block or form.group
    return place.columns is not None and group > 0 and any(c % group for c in place.columns)


def _can_join(first: QuantizedRows, second: QuantizedRows) -> bool:
    """Tell whether both sets of rows can be merged into one matrix."""
    if first.format != second.format or not _has_whole_blocks(first.format, first.shape[0]):
        return False
    if first.permutation is None or second.permutation is None:
        return first.permutation is second.permutation
    return np.array_equal(first.permutation, second.permutation)


def _has_whole_blocks(form: Format, rows: int) -> bool:
    """Tell whether `rows` rows consist of whole scale blocks."""
    return form.block is None or form.block[0] <= 1 or rows % form.block[0] == 0
