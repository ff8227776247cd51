"""Read .gguf matrices as codes and scales, without dequantizing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from engine.checks import shown
from engine.errors import WeightsError
from engine.loading.gguf import GgufFile
from engine.loading.quantized.rows import QuantizedRows
from engine.weights import FORMATS

__all__ = ["GGUF_FORMATS", "read_gguf_rows"]

Array = np.ndarray[Any, Any]

GGUF_FORMATS = {
    name: FORMATS[name.lower()]
    for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4")
}
"""Format of each ggml type that can be read as codes and scales."""


def read_gguf_rows(
    file: GgufFile, name: str, first: int, last: int, columns: tuple[int, int] | None = None
) -> QuantizedRows | None:
    """Read rows [first, last) of tensor `name`; None if it is not quantized.

    Rows of a tensor with more than two dimensions are numbered across all its matrices.

    Parameters
    ----------
    columns : (int, int), optional
        Range of columns to read, in whole blocks; all by default.

    Raises
    ------
    WeightsError
        If a scale is NaN or infinite, or `columns` cuts a block. A scale of 0 is allowed with any
        codes, since tiny scales underflow to 0 in float16.
    """
    tensor = file.tensors[name]
    form = GGUF_FORMATS.get(tensor.format.name)
    if form is None or len(tensor.shape) < 2:
        return None
    block = tensor.format.block
    width = tensor.shape[-1]
    begin, end = columns or (0, width)
    if not 0 <= begin < end <= width or begin % block or end % block:
        raise WeightsError(
            f"{file.path}: tensor {shown(name)} has blocks of {block} columns, which cannot be "
            f"divided; got the range [{begin}, {end}) of {width}. Use fewer shards"
        )
    blocks = file.read_blocks(name, first, last)[:, begin // block : end // block]
    num_rows, per_row, itemsize = blocks.shape
    flat = np.ascontiguousarray(blocks).reshape(-1, itemsize)
    parts = _READERS[form.name](flat)

    def rows_of(part: Array | None) -> Array | None:
        """Reshape values (blocks, n, ...) or (blocks,) to (rows, values per row, ...)."""
        if part is None:
            return None
        if part.ndim == 1:
            return part.reshape(num_rows, per_row)
        return part.reshape(num_rows, per_row * part.shape[1], *part.shape[2:])

    codes, scales, offsets, super_scales = map(rows_of, parts)
    assert codes is not None and scales is not None
    rows = QuantizedRows(form, codes, scales, offsets, super_scales)
    _check_finite(file, name, rows)
    return rows


def _check_finite(file: GgufFile, name: str, rows: QuantizedRows) -> None:
    for values in (rows.scales, rows.offsets, rows.super_scales):
        if values is None:
            continue
        wrong = ~np.isfinite(values) if values.dtype == np.float16 else None
        if rows.format.code == "e2m1":
            wrong = values == 255  # NaN
        if wrong is not None and wrong.any():
            row = int(np.argwhere(wrong)[0][0])
            raise WeightsError(
                f"{file.path}: tensor {shown(name)} must have finite scales; those of row {row} "
                "(counted from the first one read) are not"
            )


_Parts = tuple[Array, Array, Array | None, Array | None]


def _half(blocks: Array, start: int) -> Array:
    """Return the float16 at byte `start` of every block."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2")[:, 0]


def _nibbles(blocks: Array, start: int) -> Array:
    """Return 32 codes from the 16 bytes at `start`: low nibbles first, then high ones."""
    packed = blocks[:, start : start + 16]
    codes = np.empty((len(blocks), 32), np.uint8)
    np.bitwise_and(packed, 15, out=codes[:, :16])
    np.right_shift(packed, 4, out=codes[:, 16:])
    return codes


def _fifth_bits(blocks: Array, start: int) -> Array:
    """Return the 32 bits of the word at byte `start`, each shifted to 0 or 16."""
    packed = np.ascontiguousarray(blocks[:, start : start + 4])
    return np.unpackbits(packed, axis=1, bitorder="little") << 4


def _q4_0(blocks: Array) -> _Parts:
    return _nibbles(blocks, 2), _half(blocks, 0), None, None


def _q4_1(blocks: Array) -> _Parts:
    return _nibbles(blocks, 4), _half(blocks, 0), _half(blocks, 2), None


def _q5_0(blocks: Array) -> _Parts:
    return _nibbles(blocks, 6) | _fifth_bits(blocks, 2), _half(blocks, 0), None, None


def _q5_1(blocks: Array) -> _Parts:
    codes = _nibbles(blocks, 8) | _fifth_bits(blocks, 4)
    return codes, _half(blocks, 0), _half(blocks, 2), None


def _q8_0(blocks: Array) -> _Parts:
    return blocks[:, 2:].view(np.int8), _half(blocks, 0), None, None


def _mxfp4(blocks: Array) -> _Parts:
    return _nibbles(blocks, 1), np.ascontiguousarray(blocks[:, 0]), None, None


def _k_scales(blocks: Array) -> tuple[Array, Array, Array]:
    """Return sc (n, 8), mn (n, 8) and (d, dmin) (n, 1, 2) of blocks of Q4_K or Q5_K."""
    low, mid, high = (blocks[:, 4 + 4 * i : 8 + 4 * i] for i in range(3))
    scales = np.concatenate([low & 63, (high & 15) | ((low >> 2) & 48)], axis=1)
    minimums = np.concatenate([mid & 63, (high >> 4) | ((mid >> 2) & 48)], axis=1)
    factors = np.ascontiguousarray(blocks[:, :4]).view("<f2")
    return scales, minimums, factors[:, None]


def _k_nibbles(blocks: Array, start: int) -> Array:
    """Return 256 codes (n, 8, 32) from 128 bytes: of each 32, low nibbles, then high ones."""
    packed = blocks[:, start : start + 128].reshape(-1, 4, 32)
    codes = np.empty((len(blocks), 4, 2, 32), np.uint8)
    np.bitwise_and(packed, 15, out=codes[:, :, 0])
    np.right_shift(packed, 4, out=codes[:, :, 1])
    return codes.reshape(-1, 8, 32)


def _q4_k(blocks: Array) -> _Parts:
    scales, minimums, factors = _k_scales(blocks)
    return _k_nibbles(blocks, 16).reshape(-1, 256), scales, minimums, factors


def _q5_k(blocks: Array) -> _Parts:
    scales, minimums, factors = _k_scales(blocks)
    codes = _k_nibbles(blocks, 48)
    for group in range(8):
        codes[:, group] |= ((blocks[:, 16:48] >> group) & 1) << 4
    return codes.reshape(-1, 256), scales, minimums, factors


def _q6_k(blocks: Array) -> _Parts:
    low = blocks[:, :128].reshape(-1, 2, 64)
    high = blocks[:, 128:192].reshape(-1, 2, 32)
    codes = np.empty((len(blocks), 2, 2, 64), np.uint8)
    np.bitwise_and(low, 15, out=codes[:, :, 0])
    np.right_shift(low, 4, out=codes[:, :, 1])
    quarters = codes.reshape(-1, 2, 4, 32)
    for quarter in range(4):
        quarters[:, :, quarter] |= ((high >> (2 * quarter)) & 3) << 4
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8)
    return codes.reshape(-1, 256), scales, None, _half(blocks, 208)


_READERS: dict[str, Callable[[Array], _Parts]] = {
    "q4_0": _q4_0,
    "q4_1": _q4_1,
    "q5_0": _q5_0,
    "q5_1": _q5_1,
    "q8_0": _q8_0,
    "q4_k": _q4_k,
    "q5_k": _q5_k,
    "q6_k": _q6_k,
    "mxfp4": _mxfp4,
}
