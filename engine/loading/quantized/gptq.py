"""Read matrices of GPTQ checkpoints, with or without act-order."""

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
)
from engine.loading.quantized.unpack import as_signed, unpack_words

__all__ = ["gptq_shape", "read_gptq"]

Array = np.ndarray[Any, Any]

# Word of zero points that are all 1. Next: words of symmetric weights, minus 1 or unchanged.
_ONES = {4: 0x11111111, 8: 0x01010101}
_SYMMETRIC = {4: (0x77777777, 0x88888888), 8: (0x7F7F7F7F, 0x80808080)}


def gptq_shape(tensors: ModuleTensors, storage: Storage) -> tuple[int, int]:
    """Return the shape (N, K) of a matrix stored as (K, N), packed along K."""
    words, rows = tensors.matrix("qweight", ("I32",)).shape
    return rows, words * 32 // storage.bits


def read_gptq(
    tensors: ModuleTensors,
    storage: Storage,
    first: int,
    last: int,
    columns: tuple[int, int] | None = None,
) -> QuantizedRows:
    """Read rows [first, last) of a GPTQ matrix (see `reader.read_rows`)."""
    per_word = 32 // storage.bits
    num_rows, width = gptq_shape(tensors, storage)
    groups = -(-width // (storage.group_size or width))
    scales = tensors.view("scales", SCALE_DTYPES, (groups, num_rows))[:, first:last].T
    zeros = _zero_points(tensors, storage, (groups, num_rows), first, last)
    order = _column_order(tensors, storage, width, groups)
    step = width if order is not None else storage.format.group if storage.group_size else 1
    begin, end = check_columns(tensors, "qweight", columns, width, step)
    start = begin // per_word
    words = tensors.view("qweight", ("I32",))[start : -(-end // per_word), first:last].T
    codes = unpack_words(words, storage.bits)
    codes = codes[:, begin - start * per_word : end - start * per_word]
    rows = grouped_rows(storage, codes, scales, zeros, (begin, end), order)
    return check_scales(tensors, "scales", rows)


def _zero_points(
    tensors: ModuleTensors, storage: Storage, shape: tuple[int, int], first: int, last: int
) -> Array | None:
    """Return the zero points (n, G) of rows [first, last); None for symmetric weights."""
    groups, num_rows = shape
    bits = storage.bits
    per_word = 32 // storage.bits
    if storage.symmetric and not tensors.has("qzeros"):
        return None
    words = tensors.view("qzeros", ("I32",), (groups, -(-num_rows // per_word)))
    start = first // per_word
    part = np.ascontiguousarray(words[:, start : -(-last // per_word)]).view(np.uint32)
    if storage.symmetric:
        if not any(np.all(part == word) for word in _SYMMETRIC[bits]):
            raise tensors.error(
                "qzeros",
                "must be that of symmetric weights, as the configuration says (all words "
                f"{' or '.join(f'{word:#x}' for word in _SYMMETRIC[bits])}); got others",
            )
        return None
    if storage.zero_minus_one:
        # NOTE: add 1 to whole words, since writers subtracted it from whole words: a zero point of
        # 0 borrowed from its neighbour.
        part = part + np.uint32(_ONES[bits])
    zeros = unpack_words(part.view(np.int32), bits)
    zeros = zeros[:, first - start * per_word : last - start * per_word].T
    return as_signed(zeros) if bits == 8 else zeros


def _column_order(
    tensors: ModuleTensors, storage: Storage, width: int, groups: int
) -> Array | None:
    """Return the column order that sorts by group; None if each group's columns are consecutive.

    The tensors decide, not the configuration's desc_act. Files without act-order may hold an
    all-zero g_idx, or none.
    """
    if not tensors.has("g_idx"):
        if storage.act_order and groups > 1:
            raise tensors.error("g_idx", "is missing, but the configuration has desc_act")
        return None
    g_idx = tensors.view("g_idx", ("I32", "I64"), (width,))
    if groups > 1 and not storage.act_order and not g_idx.any():
        return None
    return column_order(tensors, "g_idx", g_idx, storage.group_size, groups)
