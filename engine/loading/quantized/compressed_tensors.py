"""Read matrices of compressed-tensors checkpoints (llm-compressor)."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.loading.quantized.rows import QuantizedRows
from engine.loading.quantized.storage import Storage
from engine.loading.quantized.tensors import (
    SCALE_DTYPES,
    ModuleTensors,
    check_columns,
    check_scales,
    column_order,
    grouped_rows,
    spread_groups,
)
from engine.loading.quantized.unpack import as_signed, unpack_words
from engine.weights import Format

__all__ = ["check_no_zero_points", "int8_shape", "packed_shape", "read_int8", "read_packed"]

Array = np.ndarray[Any, Any]

# Word of zero points in the middle of the range.
_MIDDLE = {4: 0x88888888, 8: 0x80808080}


def packed_shape(tensors: ModuleTensors, storage: Storage) -> tuple[int, int]:
    """Return the shape (N, K) of a matrix with codes packed along K.

    Raises
    ------
    WeightsError
        If the number of words does not match the shape.
    """
    words = tensors.matrix("weight_packed", ("I32",))
    stated = tensors.view("weight_shape", ("I64", "I32"), (2,))
    rows, columns = (int(size) for size in stated)
    per_word = 32 // storage.bits
    if rows < 1 or columns < 1 or words.shape != (rows, -(-columns // per_word)):
        raise tensors.error(
            "weight_packed",
            f"must have shape (N, ceil(K / {per_word})) for numbers of {storage.bits} bits, where "
            f"weight_shape is [N, K] = [{rows}, {columns}]; got {words.shape}",
        )
    return rows, columns


def read_packed(
    tensors: ModuleTensors,
    storage: Storage,
    first: int,
    last: int,
    columns: tuple[int, int] | None = None,
) -> QuantizedRows:
    """Read rows [first, last) of a "pack-quantized" matrix (see `reader.read_rows`)."""
    per_word = 32 // storage.bits
    num_rows, width = packed_shape(tensors, storage)
    groups = -(-width // (storage.group_size or width))
    scales = _scales(tensors, num_rows, groups)
    zeros = None
    if not storage.symmetric:
        shape = (-(-num_rows // per_word), groups)
        words = tensors.view("weight_zero_point", ("I32",), shape)
        zeros = _zero_points(words, storage.bits, first, last)
    order = None
    if tensors.has("weight_g_idx"):
        g_idx = tensors.view("weight_g_idx", ("I32",), (width,))
        if not np.all(g_idx == -1):  # all -1 means no act-order
            order = column_order(tensors, "weight_g_idx", g_idx, storage.group_size, groups)
    step = width if order is not None else storage.format.group if storage.group_size else 1
    begin, end = check_columns(tensors, "weight_packed", columns, width, step)
    start = begin // per_word
    words = tensors.view("weight_packed", ("I32",))[first:last, start : -(-end // per_word)]
    codes = unpack_words(words, storage.bits)
    codes = codes[:, begin - start * per_word : end - start * per_word]
    rows = grouped_rows(storage, codes, scales[first:last], zeros, (begin, end), order)
    return check_scales(tensors, "weight_scale", rows)


def _scales(tensors: ModuleTensors, num_rows: int, groups: int) -> Array:
    """Return the scales (N, G)."""
    shapes: list[tuple[int, ...]] = [(num_rows, groups)]
    if groups == 1:
        shapes += [(num_rows,), (1,), ()]
    scales = tensors.view("weight_scale", SCALE_DTYPES, *shapes)
    if scales.size == 1:
        return np.broadcast_to(scales.reshape(1, 1), (num_rows, 1))
    return scales.reshape(num_rows, groups)


def _zero_points(words: Array, bits: int, first: int, last: int) -> Array:
    """Return the zero points (n, G) of rows [first, last); words pack them along N."""
    per_word = 32 // bits
    start = first // per_word
    part = words[start : -(-last // per_word)].T
    zeros = unpack_words(part, bits)[:, first - start * per_word : last - start * per_word].T
    return as_signed(zeros) if bits == 8 else zeros


def check_no_zero_points(tensors: ModuleTensors, storage: Storage) -> None:
    """Check the zero points of a matrix that the configuration calls symmetric.

    Old writers store them all the same: zeros, or words of them.

    Raises
    ------
    WeightsError
        If one is not zero.
    """
    kind = "weight_zero_point"
    zeros = tensors.checkpoint.view(tensors.name(kind))
    middle = _MIDDLE.get(storage.bits) if zeros.dtype == np.int32 else None
    values = zeros.view(np.uint32) if middle is not None else zeros
    if bool(((values != 0) & (values != (middle or 0))).any()):
        raise tensors.error(
            kind, 'must hold zeros, since the configuration says "symmetric": true; it has others'
        )


def int8_shape(tensors: ModuleTensors, storage: Storage) -> tuple[int, int]:
    """Return the shape (N, K) of a matrix with one code per byte."""
    rows, columns = tensors.matrix("weight", ("I8",)).shape
    return rows, columns


def read_int8(
    tensors: ModuleTensors,
    storage: Storage,
    first: int,
    last: int,
    columns: tuple[int, int] | None = None,
) -> QuantizedRows:
    """Read rows [first, last) of an "int-quantized" matrix (see `reader.read_rows`)."""
    form = storage.format
    num_rows, width = int8_shape(tensors, storage)
    groups = -(-width // (storage.group_size or width))
    scales = _scales(tensors, num_rows, groups)[first:last]
    begin, end = check_columns(
        tensors, "weight", columns, width, form.group if storage.group_size else 1
    )
    codes = tensors.view("weight", ("I8",))[first:last, begin:end]
    if storage.bits == 4:
        codes = _nibble_codes(tensors, codes, form)
    if form.is_packed:
        scales = spread_groups(scales, storage.group_size, form, (begin, end))
    else:
        scales = scales.astype(np.float32)
    return check_scales(tensors, "weight_scale", QuantizedRows(form, codes, scales))


def _nibble_codes(tensors: ModuleTensors, numbers: Array, form: Format) -> Array:
    """Return the codes of 4-bit integers stored one per byte."""
    wrong = (numbers < -8) | (numbers > 7)
    if wrong.any():
        raise tensors.error("weight", f"must be in [-8, 7] for 4 bits; got {numbers[wrong][0]}")
    codes: Array = (numbers + np.int8(form.zero)).view(np.uint8)
    return codes
