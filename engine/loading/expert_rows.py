"""Reads rows of experts' matrices, in whichever layout a checkpoint stores them."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.loading.gguf import GgufFile
from engine.loading.mxfp4 import dequantize_mxfp4
from engine.loading.placement import Placement
from engine.loading.quantized.mxfp4 import read_mxfp4_experts
from engine.loading.quantized.reader import QuantizedCheckpoint
from engine.loading.quantized.rows import QuantizedRows
from engine.loading.safetensors import SafetensorsDirectory, SafetensorsFile
from engine.models.tensor_layout import ROWS, scales_name
from engine.weights import FORMATS, Format

__all__ = ["read_expert_rows", "read_stored_rows", "stored_format"]

Array = np.ndarray[Any, Any]

_Safetensors = SafetensorsFile | SafetensorsDirectory

_BLOCK = 32


def read_expert_rows(
    checkpoint: _Safetensors | GgufFile, place: Placement, first: int, last: int
) -> Array:
    """Return rows [first, last) of `place`, which are of one expert, in its columns.

    Returns
    -------
    (last - first, place.width) array
        Of any float dtype; perhaps a view of the file.
    """
    layout = place.layout
    shape = place.shape
    expert, num_rows, own = _rows_of_expert(place, first, last)
    if layout.transposed:
        num_columns = shape[1] if len(shape) > 2 else 1
        begin, end = place.columns or (0, num_columns)
        offset = expert * num_columns
        stored = checkpoint.read(place.name, offset + begin, offset + end, (own.start, own.stop))
        matrix: Array = stored[:, :: own.step].T
        return matrix
    rows = slice(expert * num_rows + own.start, expert * num_rows + own.stop, own.step)
    if layout.mxfp4 and not isinstance(checkpoint, GgufFile):  # which dequantizes by itself
        return _mxfp4_rows(checkpoint, place, rows)
    return checkpoint.read(place.name, rows.start, rows.stop, place.columns)[:: own.step]


def stored_format(checkpoint: QuantizedCheckpoint, place: Placement) -> Format | None:
    """Return the format in which a placement's tensor is stored; None if it is not quantized."""
    if place.layout.mxfp4 and not isinstance(checkpoint.checkpoint, GgufFile):
        return FORMATS["mxfp4"]
    return None if place.layout.transposed else checkpoint.format_of(place.name)


def read_stored_rows(checkpoint: QuantizedCheckpoint, place: Placement) -> QuantizedRows | None:
    """Return a placement's rows in the format of the file; None if they are not quantized."""
    if place.layout == ROWS:
        return checkpoint.read_rows(place.name, place.first, place.last, place.columns)
    if stored_format(checkpoint, place) is None:
        return None
    expert, num_rows, own = _rows_of_expert(place, place.first, place.last)
    rows = slice(expert * num_rows + own.start, expert * num_rows + own.stop, own.step)
    file = checkpoint.checkpoint
    if not isinstance(file, GgufFile):
        return read_mxfp4_experts(file, place.name, rows, place.columns)
    found = checkpoint.read_rows(place.name, rows.start, rows.stop, place.columns)
    return None if found is None else found.take(slice(None, None, rows.step))


def _rows_of_expert(place: Placement, first: int, last: int) -> tuple[int, int, slice]:
    """Return the expert of rows [first, last), its number of rows, and where it stores these."""
    layout = place.layout
    shape = place.shape
    num_rows = shape[-1] if layout.transposed else shape[1]
    expert, row = divmod(first, num_rows)
    start = row
    step = 1
    if layout.interleaved:
        is_up, row = divmod(row, num_rows // 2)
        start = 2 * row + is_up
        step = 2
    return expert, num_rows, slice(start, start + (last - first - 1) * step + 1, step)


def _mxfp4_rows(checkpoint: _Safetensors, place: Placement, rows: slice) -> Array:
    """Dequantize rows of the tensor to float32: only the blocks with some of the columns."""
    begin, end = place.columns or (0, place.shape[2] * _BLOCK)
    first = begin // _BLOCK
    last = -(-end // _BLOCK)
    blocks = checkpoint.read_bytes(place.name, rows.start, rows.stop)
    scales = checkpoint.read_bytes(scales_name(place.name), rows.start, rows.stop)
    values = dequantize_mxfp4(blocks[:: rows.step, first:last], scales[:: rows.step, first:last])
    wanted: Array = values[:, begin - first * _BLOCK : end - first * _BLOCK]
    return wanted
