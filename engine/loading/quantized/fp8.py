"""Read e4m3 matrices: Hugging Face's and DeepSeek's "fp8", and compressed-tensors."""

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
)
from engine.weights.values import E8M0

__all__ = ["fp8_shape", "read_fp8"]

Array = np.ndarray[Any, Any]

_EXPONENT_DTYPES = ("F8_E8M0", "U8")
# Despite its name, "inv" is also a factor, not a divisor.
_NAMES = ("weight_scale", "weight_scale_inv")


def fp8_shape(tensors: ModuleTensors, storage: Storage) -> tuple[int, ...]:
    """Return the shape (N, K) of the matrix, or (E, N, K) of all experts' matrices."""
    shape: tuple[int, ...] = tensors.view("weight", ("F8_E4M3",)).shape
    if len(shape) not in (2, 3) or min(shape) < 1:
        raise tensors.error("weight", f"must be a matrix; got shape {shape}")
    return shape


def read_fp8(
    tensors: ModuleTensors,
    storage: Storage,
    first: int,
    last: int,
    columns: tuple[int, int] | None = None,
) -> QuantizedRows:
    """Read rows [first, last) of an e4m3 matrix, or of all experts' (see `reader.read_rows`)."""
    form = storage.format
    shape = fp8_shape(tensors, storage)
    num_rows, width = shape[-2:]
    begin, end = check_columns(tensors, "weight", columns, width, form.group or 1)
    codes = tensors.view("weight", ("F8_E4M3",)).reshape(-1, width)
    codes = codes[first:last, begin:end].view(np.uint8)
    if codes.size and int((codes & 0x7F).max()) == 0x7F:
        row = int(np.argwhere((codes & 0x7F) == 0x7F)[0][0]) + first
        raise tensors.error("weight", f"must have finite numbers; got NaN in row {row}")
    kind = _scale_name(tensors)
    scales = _scales(tensors, kind, storage, shape)
    experts, rows = np.divmod(np.arange(first, last), num_rows)
    if storage.block is None:
        scales = scales[experts, rows]
    else:
        high, wide = storage.block
        blocks = scales[experts, rows // high]
        scales = np.ascontiguousarray(blocks[:, np.arange(begin, end, form.group) // wide])
    return check_scales(tensors, kind, QuantizedRows(form, codes, scales))


def _scale_name(tensors: ModuleTensors) -> str:
    found = [kind for kind in _NAMES if tensors.has(kind)]
    if len(found) > 1:
        raise tensors.error(found[1], f"must be absent beside {found[0]}")
    return found[0] if found else _NAMES[0]


def _scales(tensors: ModuleTensors, kind: str, storage: Storage, shape: tuple[int, ...]) -> Array:
    """Return the float32 scales of each expert (one for a matrix): (E, N, 1), or one per block."""
    *experts, num_rows, width = shape
    if storage.block is not None:
        high, wide = storage.block
        shapes = [(*experts, -(-num_rows // high), -(-width // wide))]
    elif experts:
        shapes = [(*experts, rows, 1) for rows in (1, num_rows)]
    else:
        shapes = [(), (1,), (1, 1), (num_rows, 1), (num_rows,)]
    stored = tensors.view(kind, (*SCALE_DTYPES, *_EXPONENT_DTYPES), *shapes)
    scales = E8M0[stored] if stored.dtype == np.uint8 else stored.astype(np.float32)
    if storage.block is not None:
        return scales.reshape(-1, *scales.shape[-2:])
    count = experts[0] if experts else 1
    return np.broadcast_to(scales.reshape(count, -1, 1), (count, num_rows, 1))
