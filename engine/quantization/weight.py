"""One weight: its numbers in some format, and the shard of the whole they are."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from engine.dtypes import dtype_name
from engine.quantization.formats import Format, dense_format
from engine.quantization.shard import WHOLE, Shard

__all__ = ["Weight"]


@dataclass(frozen=True, eq=False, slots=True)
class Weight:
    """The operand of a product, a norm or an embedding lookup.

    Attributes
    ----------
    format : Format
    data : array
        The numbers; in a dense format, an array of `shape`.
    shape : tuple of int
        Logical shape of this shard, (out, in) for a matrix.
    scales, zeros : array or None
        Scale and zero point per block of numbers, if the format has them.
    shard : Shard
        Which part of the whole this is.
    axis : int or None
        The axis along which the whole is divided; None if every rank holds the whole.
    """

    format: Format
    data: Any
    shape: tuple[int, ...]
    scales: Any = None
    zeros: Any = None
    shard: Shard = WHOLE
    axis: int | None = None

    @classmethod
    def dense(cls, array: Any, shard: Shard = WHOLE, axis: int | None = None) -> Weight:
        """Return `array` as a weight.

        Examples
        --------
        >>> import numpy as np
        >>> weight = Weight.dense(np.ones((2, 3), np.float32))
        >>> weight.format.name, weight.num_elements, weight.num_bytes
        ('float32', 6, 24)
        """
        form = dense_format(dtype_name(array.dtype))
        return cls(form, array, array.shape, shard=shard, axis=axis)

    @property
    def num_elements(self) -> int:
        """Number of logical elements of this shard."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of all its arrays."""
        return sum(int(array.nbytes) for _, array in self.arrays())

    def arrays(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, array) for every array it holds."""
        for name in ("data", "scales", "zeros"):
            array = getattr(self, name)
            if array is not None:
                yield name, array
