"""Formats of weights: bits per number, and the blocks of numbers that share a scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from engine.dtypes import FLOAT_NAMES, itemsize
from engine.errors import WeightsError

__all__ = ["FORMATS", "Format", "dense_format"]


@dataclass(frozen=True)
class Format:
    """How the numbers of a weight are stored.

    Attributes
    ----------
    name : str
        Its name in checkpoints and messages, such as "bfloat16".
    bits : int
        Bits per number.
    block : (int, int) or None
        Rows and columns of a block that shares a scale; 0 stands for all of them, None for no
        scales. (1, 0) is one scale per row, (1, 128) one per 128 numbers of a row.
    scale_bits : int
        Bits per scale, including its zero point if there is one.

    Examples
    --------
    >>> Format("int4 in groups of 128", 4, (1, 128), 16).num_bytes((256, 1024))
    135168
    """

    name: str
    bits: int
    block: tuple[int, int] | None = None
    scale_bits: int = 0

    @property
    def is_dense(self) -> bool:
        """Tell whether the data is a plain array of the numbers, of the logical shape."""
        return self.block is None

    def num_scales(self, shape: Sequence[int]) -> int:
        """Return how many scales a weight of this shape has."""
        if self.block is None:
            return 0
        rows, columns = math.prod(shape[:-1]), shape[-1]
        high, wide = self.block[0] or rows, self.block[1] or columns
        return -(-rows // high) * -(-columns // wide)

    def num_bytes(self, shape: Sequence[int]) -> int:
        """Return the bytes of data and scales of a weight of this shape."""
        bits = math.prod(shape) * self.bits + self.num_scales(shape) * self.scale_bits
        return -(-bits // 8)


FORMATS: dict[str, Format] = {name: Format(name, 8 * itemsize(name)) for name in FLOAT_NAMES}
"""Every supported format, by name."""


def dense_format(dtype: str) -> Format:
    """Return the format of a plain array of this dtype.

    Raises
    ------
    WeightsError
        If there is none of this name.
    """
    if dtype not in FORMATS:
        raise WeightsError(f"format must be one of {', '.join(FORMATS)}; got {dtype!r}")
    return FORMATS[dtype]
