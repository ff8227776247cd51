"""Read matrices of AWQ checkpoints in the "gemm" layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from engine.loading.quantized.rows import QuantizedRows
from engine.loading.quantized.storage import Storage, group_format
from engine.loading.quantized.tensors import (
    SCALE_DTYPES,
    ModuleTensors,
    check_columns,
    check_scales,
    grouped_rows,
)
from engine.loading.quantized.unpack import unpack_awq

__all__ = ["awq_shape", "awq_storage", "read_awq"]

Array = np.ndarray[Any, Any]

_PER_WORD = 8


def awq_storage(tensors: ModuleTensors, storage: Storage) -> Storage:
    """Return the storage of a matrix, whose zero points count wherever they are stored.

    AutoAWQ's and vLLM's kernels subtract the stored zero points, whatever the configuration's
    `zero_point` says; only a matrix without any has its zero in the middle.
    """
    if not storage.symmetric or not tensors.has("qzeros"):
        return storage
    form = group_format(storage.bits, storage.group_size, symmetric=False)
    assert form is not None
    return replace(storage, format=form, symmetric=False)


def awq_shape(tensors: ModuleTensors, storage: Storage) -> tuple[int, int]:
    """Return the shape (N, K) of a matrix stored as codes (K, N), packed along N."""
    columns, words = tensors.matrix("qweight", ("I32",)).shape
    return words * _PER_WORD, columns


def read_awq(
    tensors: ModuleTensors,
    storage: Storage,
    first: int,
    last: int,
    columns: tuple[int, int] | None = None,
) -> QuantizedRows:
    """Read rows [first, last) of an AWQ matrix (see `reader.read_rows`)."""
    num_rows, width = awq_shape(tensors, storage)
    groups = -(-width // (storage.group_size or width))
    step = storage.format.group if storage.group_size else 1
    begin, end = check_columns(tensors, "qweight", columns, width, step)
    scales = tensors.view("scales", SCALE_DTYPES, (groups, num_rows))[:, first:last].T
    zeros = None
    if not storage.symmetric:
        words = tensors.view("qzeros", ("I32",), (groups, num_rows // _PER_WORD))
        zeros = _rows_of(words, first, last)
    codes = _rows_of(tensors.view("qweight", ("I32",))[begin:end], first, last)
    rows = grouped_rows(storage, codes, scales, zeros, (begin, end))
    return check_scales(tensors, "scales", rows)


def _rows_of(words: Array, first: int, last: int) -> Array:
    """Return rows [first, last) of a matrix stored transposed in packed words."""
    start = first // _PER_WORD
    numbers = unpack_awq(words[:, start : -(-last // _PER_WORD)])
    return numbers[first - start * _PER_WORD : last - start * _PER_WORD]
