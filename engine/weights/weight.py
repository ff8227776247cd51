"""`Weight`: an array of numbers in some format, tagged with the shard it belongs to."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from engine.dtypes import dtype_name
from engine.errors import WeightsError
from engine.weights.formats import STACKED, Format, dense_format
from engine.weights.panels import Panels
from engine.weights.shard import WHOLE, Shard

__all__ = ["Weight"]


@dataclass(frozen=True, eq=False, slots=True)
class Weight:
    """Weight operand of a GEMM, a norm or an embedding lookup.

    Attributes
    ----------
    format : Format
    data : array
        Dense: an array of `shape`. Packed: the plane of all codes, or of their low 4 bits (see
        `packing`). Formats that also quantize activations ("fp8", "int8"): codes of `shape`, int8,
        or e4m3 bits as uint8.
    shape : tuple of int
        Logical shape of this shard, (out, in) for a matrix.
    scales : array or None
        Packed: (N/16, G, 8, 2), or (N/16, G, 8, 2, 2) of (scale, zero point or minimum), in the
        order of `packing.tile_groups`; float16 or bfloat16, uint8 exponents for "mxfp4", uint8
        (int8 for "q6_k") with super-blocks. Otherwise float32: (N,), or one value per block.
    high : array or None
        Packed: the plane of the fifth bit, or of bits 5 and 6.
    super_scales : array or None
        (N/16, K/256, 8, 2) of d, or (N/16, K/256, 8, 2, 2) of (d, dmin), float16.
    permutation : (K,) int32 array or None
        Column k of the data is column permutation[k] of the logical weight, and multiplies that
        column of x.
    panels : Panels or None
        Packed, in the layout of the CPU's products: codes, scales and offsets, instead of the
        arrays above.
    parts : tuple of Weight
        Parts of a stacked weight in row order. The stacked weight itself has no data.
    shard : Shard
        Which part of the whole weight this is.
    axis : int or None
        Axis along which the whole weight is sharded; None if every rank holds all of it.
    """

    format: Format
    data: Any
    shape: tuple[int, ...]
    scales: Any = None
    high: Any = None
    super_scales: Any = None
    permutation: Any = None
    panels: Panels | None = None
    parts: tuple[Weight, ...] = ()
    shard: Shard = WHOLE
    axis: int | None = None

    @classmethod
    def dense(cls, array: Any, shard: Shard = WHOLE, axis: int | None = None) -> Weight:
        """Wrap a plain array as a weight.

        Examples
        --------
        >>> import numpy as np
        >>> weight = Weight.dense(np.ones((2, 3), np.float32))
        >>> weight.format.name, weight.num_elements, weight.num_bytes
        ('float32', 6, 24)
        """
        form = dense_format(dtype_name(array.dtype))
        return cls(form, array, array.shape, shard=shard, axis=axis)

    @classmethod
    def stacked(cls, parts: Sequence[Weight]) -> Weight:
        """Stack several matrices along their rows into one weight.

        Raises
        ------
        WeightsError
            If their column counts differ.
        """
        columns = {part.shape[1] for part in parts}
        if len(columns) != 1:
            raise WeightsError(f"parts must have the same number of columns; got {sorted(columns)}")
        rows = sum(part.shape[0] for part in parts)
        return cls(STACKED, None, (rows, *columns), parts=tuple(parts))

    @property
    def num_elements(self) -> int:
        """Number of logical elements of this shard."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Total bytes of all arrays."""
        return sum(int(array.nbytes) for _, array in self.arrays())

    def formats(self) -> Iterator[Format]:
        """Yield the weight's format, or the formats of its parts."""
        if not self.parts:
            yield self.format
        for part in self.parts:
            yield from part.formats()

    def arrays(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, array) for every array the weight holds."""
        for index, part in enumerate(self.parts):
            yield from ((f"{index}.{name}", array) for name, array in part.arrays())
        for name in ("data", "scales", "high", "super_scales", "permutation"):
            array = getattr(self, name)
            if array is not None:
                yield name, array
        if self.panels is not None:
            yield from self.panels.arrays()
