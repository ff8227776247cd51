"""Weight formats: how stored codes map to numbers, and which numbers share a scale."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine.checks import shown
from engine.dtypes import FLOAT_NAMES, itemsize
from engine.errors import WeightsError

__all__ = ["FORMATS", "GGUF_FORMATS", "STACKED", "TILE_COLUMNS", "TILE_ROWS", "Format"]
__all__ += ["dense_format", "format_of", "padded_shape"]

# Tile of the packed formats; see `packing`.
TILE_ROWS = 16
TILE_COLUMNS = 64


def padded_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of a packed weight (..., N, K) with whole tiles.

    Examples
    --------
    >>> padded_shape((40, 100))
    (48, 128)
    """
    *rest, rows, columns = shape
    high = -(-rows // TILE_ROWS)
    wide = -(-columns // TILE_COLUMNS)
    return *rest, high * TILE_ROWS, wide * TILE_COLUMNS


@dataclass(frozen=True)
class Format:
    """Storage format of a weight: codes, scales and groups.

    A code q in a group with scale s represents

        s (q - zero)    in a symmetric format; `zero` is the same in all groups
        s (q - z)       with `offset` "zero": z is the group's zero point, an integer
        s q + m         with `offset` "min": m is the group's minimum

    With a `super_block`, s and m are themselves quantized as s = d sc and m = -dmin mn: integers sc
    and mn, and float16 scales shared by `super_block` numbers.

    Attributes
    ----------
    name : str
        Name in options, checkpoints and messages, such as "bfloat16" or "int4_g128".
    bits : int
        Bits per number.
    block : (int, int) or None
        Rows and columns per scale; 0 means all of them, None means no scales. (1, 0) is one scale
        per row, (1, 128) one per 128 numbers of a row.
    scale_bits : int
        Bits per scale, including a group's zero point or minimum.
    code : str
        Code type: "float" (the number itself), "int", "e4m3" or "e2m1".
    zero : int
        Code that represents 0 in a symmetric format.
    offset : str
        "" (symmetric), "zero" or "min".
    super_block : int
        Numbers of a row whose integer scales share a float16 scale; 0 if scales are floats.
    activations : str
        Format the activations are quantized to: "" (none), "fp8" or "int8".
    activation_group : int
        Activations per scale along a token; 0 for one scale per token.

    Examples
    --------
    >>> Format("int4 in groups of 128", 4, (1, 128), 16).num_bytes((256, 1024))
    135168
    """

    name: str
    bits: int
    block: tuple[int, int] | None = None
    scale_bits: int = 0
    code: str = "float"
    zero: int = 0
    offset: str = ""
    super_block: int = 0
    activations: str = ""
    activation_group: int = 0

    @property
    def is_dense(self) -> bool:
        """Tell whether the data is a plain array of numbers in the logical shape."""
        return self.block is None

    @property
    def is_packed(self) -> bool:
        """Tell whether the data is stored as `packing`'s bit planes, for 16-bit activations."""
        return self.code in ("int", "e2m1") and not self.activations

    @property
    def group(self) -> int:
        """Consecutive numbers per scale along a row; 0 for one scale per row."""
        return 0 if self.block is None else self.block[1]

    @property
    def code_range(self) -> tuple[int, int]:
        """Smallest and largest code of an integer format."""
        low = -128 if self.bits == 8 else 0
        return low, low + (1 << self.bits) - 1

    def num_scales(self, shape: Sequence[int]) -> int:
        """Return the number of scales of a weight of this shape."""
        if self.block is None:
            return 0
        rows = math.prod(shape[:-1])
        columns = shape[-1]
        high = self.block[0] or rows
        wide = self.block[1] or columns
        return -(-rows // high) * -(-columns // wide)

    def num_bytes(self, shape: Sequence[int]) -> int:
        """Return the size in bytes of a weight of this shape: data, scales and padding."""
        if self.is_packed:
            shape = padded_shape(shape)
        bits = math.prod(shape) * self.bits + self.num_scales(shape) * self.scale_bits
        if self.super_block:
            rows = math.prod(shape[:-1])
            columns = shape[-1]
            scales = 2 if self.offset else 1
            bits += rows * -(-columns // self.super_block) * scales * 16
        return -(-bits // 8)


def _group_formats() -> Iterator[Format]:
    """Yield the integer formats with one float scale per group."""
    for bits, zero in ((4, 8), (8, 0)):
        for group in (32, 64, 128):
            name = f"int{bits}_g{group}"
            yield Format(name, bits, (1, group), 16, "int", zero)
            yield Format(f"{name}_zp", bits, (1, group), 32, "int", offset="zero")


_GGUF = (
    Format("q4_0", 4, (1, 32), 16, "int", 8),
    Format("q4_1", 4, (1, 32), 32, "int", offset="min"),
    Format("q5_0", 5, (1, 32), 16, "int", 16),
    Format("q5_1", 5, (1, 32), 32, "int", offset="min"),
    Format("q8_0", 8, (1, 32), 16, "int"),
    Format("q4_k", 4, (1, 32), 16, "int", offset="min", super_block=256),
    Format("q5_k", 5, (1, 32), 16, "int", offset="min", super_block=256),
    Format("q6_k", 6, (1, 16), 8, "int", 32, super_block=256),
)

GGUF_FORMATS: tuple[str, ...] = tuple(form.name for form in _GGUF)
"""Names of the formats found only in .gguf files."""

FORMATS: dict[str, Format] = {
    form.name: form
    for form in (
        *(Format(name, 8 * itemsize(name)) for name in FLOAT_NAMES),
        Format("fp8", 8, (1, 0), 32, "e4m3", activations="fp8"),
        Format("fp8_block", 8, (128, 128), 32, "e4m3", activations="fp8", activation_group=128),
        Format("int8", 8, (1, 0), 32, "int", activations="int8", activation_group=128),
        Format("mxfp4", 4, (1, 32), 8, "e2m1"),
        *_group_formats(),
        *_GGUF,
    )
}
"""All supported formats by name. 8-bit codes are signed, others unsigned."""

STACKED = Format("stacked", 0, (0, 0))
"""Placeholder format of a stacked weight; each part has its own format."""


def dense_format(dtype: str) -> Format:
    """Return the format of a plain array of this dtype.

    Raises
    ------
    WeightsError
        If the dtype is unknown.
    """
    if dtype not in FLOAT_NAMES:
        raise WeightsError(f"format must be one of {', '.join(FLOAT_NAMES)}; got {dtype!r}")
    return FORMATS[dtype]


def format_of(name: str) -> Format:
    """Return the format called `name`.

    Raises
    ------
    WeightsError
        If the name is unknown; the message lists the known ones.
    """
    if name not in FORMATS:
        raise WeightsError(f"format must be one of {', '.join(FORMATS)}; got {shown(name)}")
    return FORMATS[name]
