"""Memory layout of quantized weights for products on the CPU.

A product widens the codes to float32 on the way: reading a byte or half a byte a number instead of
four more than pays for it. A weight (N, K) is cut into panels of 64 output features, and a panel
into groups of g input features that share a scale. A panel's codes are (K/g, g, 64) int8: one
vector of codes belongs to one input feature, whose number multiplies it, and the scales (K/g, 64)
are applied to the sums of the groups, 1/g of the work of scaling the weights. A product reads all
arrays once, from front to back.

Codes of 4 bits are (K/g, g/2, 64): a byte holds feature i of its group in the low half, and feature
g/2 + i in the high half, each in two's complement.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from engine.weights.formats import Format

__all__ = ["WIDTH", "Panels", "panel_bits", "panel_format"]

Array = np.ndarray[Any, Any]

WIDTH = 64  # output features of a panel


@dataclass(frozen=True, eq=False)
class Panels:
    """A matrix (N, K) of integer codes: number = scale * code + offset.

    P = ceil(N / 64) panels; the features after N are zeros. G = K / g groups.

    Attributes
    ----------
    codes : (P, G, g, 64) array of int8
        With 4 bits (P, G, g / 2, 64).
    scales : (P, G, 64) array of float32
    offsets : (P, G, 64) array of float32, or None
    shape : (int, int)
        N and K.
    bits : int
        Bits of a code, 8 or 4.
    """

    codes: Array
    scales: Array
    offsets: Array | None
    shape: tuple[int, int]
    bits: int = 8

    @classmethod
    def of(cls, codes: Array, scales: Array, offsets: Array | None, bits: int = 8) -> Panels:
        """Lay out a matrix.

        Parameters
        ----------
        codes : (N, K) array of int8
        scales : (N, G) array of float32
        offsets : (N, G) array of float32, or None
        bits : int
            8, or 4 for codes from -8 to 7 in groups of an even number.

        Examples
        --------
        >>> codes = np.arange(64, dtype=np.int8).reshape(2, 32)
        >>> panels = Panels.of(codes, np.full((2, 1), 0.5, np.float32), None)
        >>> panels.numbers()[1, :3]
        array([16. , 16.5, 17. ], dtype=float32)
        """
        num_rows, num_columns = codes.shape
        num_groups = scales.shape[1]
        if bits == 4:
            low, high = codes.reshape(num_rows, num_groups, 2, -1).transpose(2, 0, 1, 3)
            codes = ((low & 15) | (high << 4)).reshape(num_rows, -1)
        columns = _cut(codes)
        return cls(
            columns.reshape(len(columns), num_groups, -1, WIDTH),
            _cut(scales),
            None if offsets is None else _cut(offsets),
            (num_rows, num_columns),
            bits,
        )

    def arrays(self) -> Iterator[tuple[str, Array]]:
        """Yield (name, array) for every array."""
        yield "codes", self.codes
        yield "scales", self.scales
        if self.offsets is not None:
            yield "offsets", self.offsets

    @cached_property
    def addresses(self) -> tuple[int, int, int | None]:
        """Addresses of codes, scales and offsets."""
        offsets = None if self.offsets is None else self.offsets.ctypes.data
        return self.codes.ctypes.data, self.scales.ctypes.data, offsets

    @property
    def group(self) -> int:
        """Input features that share a scale, g."""
        num_groups: int = self.scales.shape[1]
        return self.shape[1] // num_groups

    def widen(self, panels: slice, out: Array) -> Array:
        """Write the codes of some panels to `out` (p, G, g, 64), and return it."""
        codes = self.codes[panels]
        if self.bits == 8:
            np.copyto(out, codes)
            return out
        half = codes.shape[2]
        np.copyto(out[:, :, half:], codes >> 4)
        np.copyto(out[:, :, :half], (codes << 4) >> 4)
        return out

    def numbers(self) -> Array:
        """Return the matrix (N, K) in float32."""
        numbers = np.empty((*self.scales.shape[:2], self.group, WIDTH), np.float32)
        self.widen(slice(None), numbers)
        numbers *= self.scales[:, :, None]
        if self.offsets is not None:
            numbers += self.offsets[:, :, None]
        rows = numbers.reshape(len(numbers), -1, WIDTH).transpose(0, 2, 1)
        matrix: Array = rows.reshape(-1, self.shape[1])[: self.shape[0]]
        return matrix


def _cut(matrix: Array) -> Array:
    """Return the matrix (N, C) as panels (P, C, 64); missing rows are zeros."""
    num_rows, num_columns = matrix.shape
    panels = np.zeros((-(-num_rows // WIDTH), num_columns, WIDTH), matrix.dtype)
    whole = num_rows // WIDTH
    panels[:whole] = matrix[: whole * WIDTH].reshape(whole, WIDTH, num_columns).transpose(0, 2, 1)
    if whole < len(panels):
        panels[whole, :, : num_rows - whole * WIDTH] = matrix[whole * WIDTH :].T
    return panels


def panel_format(form: Format, min_bits: int) -> Format:
    """Return a format of the size that a weight of `form` has in panels; others as they are.

    Examples
    --------
    >>> from engine.weights.formats import FORMATS
    >>> panel_format(FORMATS["q4_0"], 4).num_bytes((64, 128))
    5120
    """
    if not form.is_packed:
        return form
    scale_bits = 64 if form.offset else 32
    return replace(form, bits=panel_bits(form, min_bits), scale_bits=scale_bits, super_block=0)


def panel_bits(form: Format, min_bits: int) -> int:
    """Return the bits that a code of `form` takes in panels of at least `min_bits` bits: 4 or 8."""
    return 4 if form.bits == min_bits == 4 and form.code == "int" else 8
