"""Read ternary matrices of BitNet, four to a byte."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.loading.quantized.rows import QuantizedRows
from engine.loading.quantized.storage import Storage
from engine.loading.quantized.tensors import SCALE_DTYPES, ModuleTensors, check_columns

__all__ = ["bitnet_shape", "read_bitnet"]

Array = np.ndarray[Any, Any]

_PER_BYTE = 4


def bitnet_shape(tensors: ModuleTensors, storage: Storage) -> tuple[int, ...]:
    """Return the shape (N, K) of the matrix."""
    rows, columns = tensors.matrix("weight", ("U8",)).shape
    return _PER_BYTE * rows, columns


def read_bitnet(
    tensors: ModuleTensors,
    storage: Storage,
    first: int,
    last: int,
    columns: tuple[int, int] | None = None,
) -> QuantizedRows:
    """Read rows [first, last) of a ternary matrix (see `reader.read_rows`).

    Byte (r, k) holds -1, 0 or 1, plus 1, of rows r, r + N / 4, r + N / 2, ... in its pairs of bits,
    the lowest first.
    """
    packed = tensors.matrix("weight", ("U8",))
    begin, end = check_columns(tensors, "weight", columns, packed.shape[1], 1)
    parts, rows = np.divmod(np.arange(first, last), packed.shape[0])
    shifts = (2 * parts).astype(np.uint8)[:, None]
    codes = ((packed[rows, begin:end] >> shifts) & 3).view(np.int8) - np.int8(1)
    if codes.size and int(codes.max()) > 1:
        row = int(np.argwhere(codes > 1)[0][0]) + first
        raise tensors.error("weight", f"must hold -1, 0 and 1; got 2 in row {row}")
    scales = np.full((last - first, 1), _scale(tensors, storage), np.float32)
    return QuantizedRows(storage.format, codes, scales)


def _scale(tensors: ModuleTensors, storage: Storage) -> float:
    """Return the factor on the matrix; a "bitlinear" stores what its products are divided by."""
    stored = float(tensors.view("weight_scale", SCALE_DTYPES, (1,), ()).reshape(-1)[0])
    if not (np.isfinite(stored) and stored > 0):
        raise tensors.error("weight_scale", f"must be finite and above 0; got {stored}")
    return 1.0 / stored if storage.layout == "bitlinear" else stored
