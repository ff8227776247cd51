"""Memory layout of quantized weights for products on the CPU.

A product widens the codes to float32 on the way: reading one byte a number instead of four more
than pays for it. A weight (N, K) is cut into panels of 64 output features, and a panel into groups
of g input features that share a scale. A panel's codes are (K/g, g, 64) int8: one vector of codes
belongs to one input feature, whose number multiplies it, and the scales (K/g, 64) are applied to
the sums of the groups, 1/g of the work of scaling the weights. A product reads all arrays once,
from front to back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from engine.weights.formats import Format

__all__ = ["WIDTH", "Panels", "panel_format"]

Array = np.ndarray[Any, Any]

WIDTH = 64  # output features of a panel


@dataclass(frozen=True, eq=False)
class Panels:
    """A matrix (N, K) of integer codes: number = scale * code + offset.

    P = ceil(N / 64) panels; the features after N are zeros. G = K / g groups.

    Attributes
    ----------
    codes : (P, G, g, 64) array of int8
    scales : (P, G, 64) array of float32
    offsets : (P, G, 64) array of float32, or None
    shape : (int, int)
        N and K.
    """

    codes: Array
    scales: Array
    offsets: Array | None
    shape: tuple[int, int]

    @classmethod
    def of(cls, codes: Array, scales: Array, offsets: Array | None) -> Panels:
        """Lay out a matrix.

        Parameters
        ----------
        codes : (N, K) array of int8
        scales : (N, G) array of float32
        offsets : (N, G) array of float32, optional

        Examples
        --------
        >>> codes = np.arange(64, dtype=np.int8).reshape(2, 32)
        >>> panels = Panels.of(codes, np.full((2, 1), 0.5, np.float32), None)
        >>> panels.numbers()[1, :3]
        array([16. , 16.5, 17. ], dtype=float32)
        """
        num_rows, num_columns = codes.shape
        columns = _cut(codes)
        return cls(
            columns.reshape(len(columns), scales.shape[1], -1, WIDTH),
            _cut(scales),
            None if offsets is None else _cut(offsets),
            (num_rows, num_columns),
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

    def numbers(self) -> Array:
        """Return the matrix (N, K) in float32."""
        numbers = self.codes * self.scales[:, :, None]
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


def panel_format(form: Format) -> Format:
    """Return a format of the size that a weight of `form` has in panels; others as they are.

    Examples
    --------
    >>> from engine.weights.formats import FORMATS
    >>> panel_format(FORMATS["q4_0"]).num_bytes((64, 128))
    9216
    """
    if not form.is_packed:
        return form
    has_offset = form.offset == "min" or (form.offset == "zero" and form.bits == 8)
    return replace(form, bits=8, scale_bits=64 if has_offset else 32, super_block=0)
