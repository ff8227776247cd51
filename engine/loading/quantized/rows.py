"""`QuantizedRows`: the codes and scales of rows of a quantized matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from engine.dtypes import BFLOAT16
from engine.errors import WeightsError
from engine.weights import Format, Weight, pack_weight
from engine.weights.panels import Panels, panel_bits
from engine.weights.values import E2M1, E4M3, E8M0

__all__ = ["QuantizedRows"]

Array = np.ndarray[Any, Any]

_PER_ROW = ("scales", "offsets", "super_scales")


@dataclass(frozen=True, eq=False)
class QuantizedRows:
    """Rows (n, K) of a quantized matrix, exactly as a checkpoint stores them.

    Attributes
    ----------
    format : Format
        A quantized format.
    codes : (n, K) array
        uint8; int8 for 8-bit integers.
    scales : (n, G) array
        One per row and group of columns; G = 1 for one scale per row. In "fp8_block" each row
        repeats its block's scale. float16, bfloat16 or float32; float32 for "fp8", "fp8_block" and
        "int8"; uint8 exponents for "mxfp4"; with super-blocks uint8, or int8 for "q6_k".
    offsets : (n, G) array, optional
        Zero points as codes (uint8; int8 for 8 bits), minimums (float16), or, with super-blocks,
        integer factors of the minimums (uint8).
    super_scales : (n, K / 256) or (n, K / 256, 2) array of float16, optional
        d, or d and dmin.
    permutation : (K,) array of int32, optional
        Column k of the codes is column permutation[k] of the matrix.
    """

    format: Format
    codes: Array
    scales: Array
    offsets: Array | None = None
    super_scales: Array | None = None
    permutation: Array | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        rows, columns = self.codes.shape
        return rows, columns

    def take(self, rows: Any) -> QuantizedRows:
        """Return the rows selected by an index (integers, bools or a slice), in index order."""
        chosen: dict[str, Any] = {
            name: value[rows]
            for name in ("codes", *_PER_ROW)
            if (value := getattr(self, name)) is not None
        }
        return replace(self, **chosen)

    @classmethod
    def concat(cls, parts: Sequence[QuantizedRows]) -> QuantizedRows:
        """Concatenate the rows of all parts.

        Raises
        ------
        WeightsError
            If the parts differ in format, width or permutation.
        """
        first = parts[0]
        for part in parts[1:]:
            _check_equal("format", first.format.name, part.format.name)
            _check_equal("number of columns", first.shape[1], part.shape[1])
            if not _are_equal(first.permutation, part.permutation):
                raise WeightsError(
                    "matrices that are multiplied as one must have the same order of columns; "
                    "got different g_idx"
                )
        if len({part.scales.dtype for part in parts}) > 1:  # float32 holds any of them exactly
            parts = [replace(part, scales=part.scales.astype(np.float32)) for part in parts]
        joined: dict[str, Any] = {
            name: np.concatenate([getattr(part, name) for part in parts])
            for name in ("codes", *_PER_ROW)
            if getattr(first, name) is not None
        }
        return replace(first, **joined)

    def numbers(self) -> Array:
        """Dequantize to float32 (n, K), in the matrix's column order."""
        form = self.format
        columns = self.shape[1]
        numbers = _decoded(form, self.codes)
        scales, offsets = self._float_scales()
        if form.offset == "zero" and offsets is not None:
            numbers -= _spread(offsets, form.group, columns)
        numbers *= _spread(scales, form.group, columns)
        if form.offset == "min" and offsets is not None:
            numbers += _spread(offsets, form.group, columns)
        if self.permutation is None:
            return numbers
        ordered = np.empty_like(numbers)
        ordered[:, self.permutation] = numbers
        return ordered

    def to_weight(self, name: str = "matrix") -> Weight:
        """Return the rows as a weight in the kernels' layout; `name` is for messages.

        float32 scales of a packed format are rounded: to float16, which loses less, if every scale
        is 0 or in its normal range; else to bfloat16.

        Raises
        ------
        WeightsError
            If rows of one "fp8_block" block have different scales.
        """
        form = self.format
        if form.is_packed:
            scales = _rounded(self.scales) if self.scales.dtype == np.float32 else self.scales
            permutation = self.permutation
            return pack_weight(form, self.codes, scales, self.offsets, self.super_scales,
                               permutation)  # fmt: skip
        codes = np.ascontiguousarray(self.codes)
        scales = self._block_scales(name) if form.group else self.scales[:, 0]
        return Weight(form, codes, self.shape, scales=np.ascontiguousarray(scales))

    @property
    def fits_panels(self) -> bool:
        """Tell whether the rows can be laid out as `Panels`."""
        form = self.format
        return form.is_packed and self.codes.size > 0 and self.shape[1] % form.group == 0

    def to_panels(self, min_bits: int = 4) -> Weight:
        """Return the rows as a weight in the layout of the CPU's products.

        Codes of 4 bits keep their size if `min_bits` is 4; all others take 8 bits.
        The codes become signed numbers around 0. Zero points that differ by group become offsets.
        """
        form = self.format
        bits = panel_bits(form, min_bits)
        scales, offsets = self._float_scales()
        codes = self.codes.view(np.int8)
        zero = 8 if bits == 4 else form.zero
        if form.code == "e2m1":  # multiples of a half
            codes = (2 * E2M1)[codes].astype(np.int8)
            scales = scales * np.float32(0.5)
        elif form.offset == "zero" and offsets is not None:
            offsets = (np.float32(zero) - offsets) * scales
        elif offsets is not None:
            offsets = offsets + np.float32(zero) * scales
        if zero:
            codes = codes - np.int8(zero)
        panels = Panels.of(codes, scales, offsets, bits)
        return Weight(form, None, self.shape, permutation=self.permutation, panels=panels)

    def _float_scales(self) -> tuple[Array, Array | None]:
        """Return float32 scales and offsets (n, G)."""
        form = self.format
        offsets = self.offsets
        if form.code == "e2m1":
            return E8M0[self.scales], None
        scales = self.scales.astype(np.float32)
        offsets = None if offsets is None else offsets.astype(np.float32)
        if self.super_scales is None:
            return scales, offsets
        factors = self.super_scales.astype(np.float32)
        spread = np.repeat(factors, form.super_block // form.group, axis=1)[:, : scales.shape[1]]
        if offsets is None:
            return scales * spread, None
        return scales * spread[..., 0], -(offsets * spread[..., 1])

    def _block_scales(self, name: str) -> Array:
        """Return one scale per block of rows; all rows of a block hold equal copies."""
        assert self.format.block is not None
        high = self.format.block[0]
        blocks = self.scales[::high]
        if not np.array_equal(np.repeat(blocks, high, axis=0)[: len(self.scales)], self.scales):
            raise WeightsError(
                f"{name} must have a multiple of {high} rows in each part that is multiplied with "
                f"others as one, since a block of {self.format.name} has one scale; got "
                f'{self.shape[0]} rows. Use fewer shards, or quantization="none"'
            )
        return blocks


def _decoded(form: Format, codes: Array) -> Array:
    """Return the codes as float32, before scale and offset."""
    if form.code == "int":
        numbers: Array = codes.astype(np.float32)
        numbers -= np.float32(form.zero)
        return numbers
    decoded: Array = (E4M3 if form.code == "e4m3" else E2M1)[codes]
    return decoded


def _spread(values: Array, group: int, columns: int) -> Array:
    """Repeat each group's value for each of its columns."""
    return np.repeat(values, group, axis=1)[:, :columns] if group else values


def _rounded(scales: Array) -> Array:
    """Round float32 scales to the 16-bit dtype that loses less."""
    with np.errstate(over="ignore"):
        half = scales.astype(np.float16)
        bfloat = scales.astype(BFLOAT16)
    if np.array_equal(bfloat.astype(np.float32), scales):
        return bfloat
    magnitude = np.abs(half)
    normal = (magnitude >= np.finfo(np.float16).smallest_normal) & np.isfinite(magnitude)
    return half if np.all(normal | (scales == 0)) else bfloat


def _are_equal(first: Array | None, second: Array | None) -> bool:
    if first is None or second is None:
        return first is second
    return np.array_equal(first, second)


def _check_equal(what: str, first: object, second: object) -> None:
    if first != second:
        raise WeightsError(
            f"matrices that are multiplied as one must have the same {what}; "
            f"got {first} and {second}"
        )
