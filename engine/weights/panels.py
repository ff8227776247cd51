"""Memory layout of quantized weights for products on the CPU.

NumPy multiplies floats only, so a product widens the codes to float32 on the way, a piece at a time
into a buffer that stays in the cache: on one thread, reading one byte a number instead of four more
than pays for it. A weight (N, K) is cut into panels of n output features, and a panel into groups
of g input features that share a scale. A panel's codes are (K/g, g, n) int8: n is the inner axis,
so that one conversion and one batch of K/g products of (T, g) by (g, n) compute the sums of the
groups, and the scales (K/g, n) are applied to these sums, 1/g of the work of scaling the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from engine.weights.formats import Format

__all__ = ["Panel", "Panels", "panel_format"]

Array = np.ndarray[Any, Any]

_MAX_ELEMENTS = 1 << 18  # maximum numbers of a panel: as float32 they fit in an L2 cache of 1 MiB
_MULTIPLE = 16  # output features of a panel come in whole vectors


class Panel(NamedTuple):
    """Views of one panel's arrays.

    Attributes
    ----------
    features : slice
        The panel's output features.
    codes : (G, g, n) array of int8
    scales : (G, 1, n) array of float32
    """

    features: slice
    codes: Array
    scales: Array


@dataclass(frozen=True, eq=False)
class Panels:
    """A matrix (N, K) of integer codes: number = scale * code + offset.

    Attributes
    ----------
    codes : (N * K,) array of int8
        The panels' codes (G, g, n), one panel after the other.
    scales : (N * G,) array of float32
        The panels' scales (G, n), likewise.
    offsets : (G, N) array of float32, or None
    shape : (int, int)
        N and K.
    group : int
        g, the input features that share a scale; K is a multiple of it.
    width : int
        n, the output features of a panel; the last one may be narrower.
    """

    codes: Array
    scales: Array
    offsets: Array | None
    shape: tuple[int, int]
    group: int
    width: int

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
        num_groups = scales.shape[1]
        group = num_columns // num_groups
        panels = cls(
            np.empty(codes.size, np.int8),
            np.empty(scales.size, np.float32),
            None if offsets is None else np.ascontiguousarray(offsets.T),
            (num_rows, num_columns),
            group,
            _width(num_rows, num_columns),
        )
        for features, own_codes, own_scales in panels.views:
            own_codes[...] = codes[features].T.reshape(own_codes.shape)
            own_scales[:, 0] = scales[features].T
        return panels

    @cached_property
    def views(self) -> tuple[Panel, ...]:
        """Views of the panels, in order."""
        return tuple(self._views())

    def _views(self) -> Iterator[Panel]:
        num_rows, num_columns = self.shape
        groups = num_columns // self.group
        for start in range(0, num_rows, self.width):
            stop = min(start + self.width, num_rows)
            codes = self.codes[start * num_columns : stop * num_columns]
            scales = self.scales[start * groups : stop * groups]
            yield Panel(
                slice(start, stop),
                codes.reshape(groups, self.group, stop - start),
                scales.reshape(groups, 1, stop - start),
            )

    def arrays(self) -> Iterator[tuple[str, Array]]:
        """Yield (name, array) for every array."""
        yield "codes", self.codes
        yield "scales", self.scales
        if self.offsets is not None:
            yield "offsets", self.offsets

    def widen(self, panel: Panel, out: Array) -> Array:
        """Write a panel's numbers to `out` (G, g, n) float32, and return it."""
        np.copyto(out, panel.codes)
        np.multiply(out, panel.scales, out=out)
        if self.offsets is not None:
            np.add(out, self.offsets[:, None, panel.features], out=out)
        return out

    def numbers(self) -> Array:
        """Return the matrix (N, K) in float32."""
        matrix = np.empty(self.shape, np.float32)
        for panel in self.views:
            numbers = self.widen(panel, np.empty(panel.codes.shape, np.float32))
            matrix[panel.features] = numbers.reshape(self.shape[1], -1).T
        return matrix


def _width(num_rows: int, num_columns: int) -> int:
    """Return the output features of a panel: as many as fit, in panels of about one size."""
    most = max(_MULTIPLE, _MAX_ELEMENTS // max(1, num_columns))
    count = -(-num_rows // most)
    each = -(-num_rows // max(1, count))
    return -(-each // _MULTIPLE) * _MULTIPLE


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
