"""Read MXFP4 matrices: gpt-oss's experts, and compressed-tensors matrices.

Groups of 32 4-bit numbers share a power-of-two scale: OCP Microscaling Formats (MX)
Specification 1.0, sections 5.3.3 (E2M1) and 5.4.1 (E8M0).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.checks import shown
from engine.errors import WeightsError
from engine.loading.quantized.rows import QuantizedRows
from engine.loading.quantized.storage import Storage
from engine.loading.quantized.tensors import ModuleTensors, check_columns, check_scales
from engine.loading.quantized.unpack import unpack_nibbles
from engine.loading.safetensors import SafetensorsDirectory, SafetensorsFile
from engine.models.tensor_layout import scales_name
from engine.weights import FORMATS
from engine.weights.values import E2M1, E8M0

__all__ = ["dequantize_mxfp4", "mxfp4_shape", "read_mxfp4", "read_mxfp4_experts"]

Array = np.ndarray[Any, Any]

_BLOCK = 32  # columns per scale

# Both numbers of a byte, low nibble first, as one uint64: one lookup per byte is several times
# faster than two.
_PAIRS = np.stack([np.tile(E2M1, 16), np.repeat(E2M1, 16)], axis=1).view(np.uint64)[:, 0]


def mxfp4_shape(tensors: ModuleTensors, storage: Storage) -> tuple[int, int]:
    """Return the shape (N, K) of a matrix with two codes per byte."""
    rows, num_bytes = tensors.matrix("weight_packed", ("U8",)).shape
    return rows, 2 * num_bytes


def read_mxfp4(
    tensors: ModuleTensors,
    storage: Storage,
    first: int,
    last: int,
    columns: tuple[int, int] | None = None,
) -> QuantizedRows:
    """Read rows [first, last) of an "mxfp4-pack-quantized" matrix (see `reader.read_rows`)."""
    num_rows, width = mxfp4_shape(tensors, storage)
    begin, end = check_columns(tensors, "weight_packed", columns, width, _BLOCK)
    shape = (num_rows, -(-width // _BLOCK))
    exponents = tensors.view("weight_scale", ("U8", "F8_E8M0"), shape)
    packed = tensors.view("weight_packed", ("U8",))[first:last, begin // 2 : end // 2]
    scales = np.ascontiguousarray(exponents[first:last, begin // _BLOCK : -(-end // _BLOCK)])
    rows = QuantizedRows(storage.format, unpack_nibbles(packed), scales)
    return check_scales(tensors, "weight_scale", rows)


def read_mxfp4_experts(
    checkpoint: SafetensorsFile | SafetensorsDirectory,
    name: str,
    rows: slice,
    columns: tuple[int, int] | None = None,
) -> QuantizedRows:
    """Read rows of gpt-oss's experts from tensors "<...>_blocks" and "<...>_scales".

    Parameters
    ----------
    checkpoint : SafetensorsFile or SafetensorsDirectory
    name : str
        Name of the blocks tensor, (E, N, K / 32, 16) with two numbers per byte.
    rows : slice
        Slice of the E N rows of all matrices; step 2 selects gate's or up's rows.
    columns : (int, int), optional
        Range of columns to read, in whole blocks; all by default.

    Raises
    ------
    WeightsError
        If a tensor is missing or has another shape or dtype, or an exponent is NaN.
    """
    blocks = name
    exponents = scales_name(name)
    for one in (blocks, exponents):
        if one not in checkpoint:
            raise WeightsError(f"{checkpoint.path}: tensor {shown(one)} is missing")
    shape = checkpoint.shape(blocks)
    if len(shape) != 4 or shape[3] != _BLOCK // 2 or checkpoint.shape(exponents) != shape[:3]:
        raise WeightsError(
            f"{checkpoint.path}: tensor {shown(blocks)} must have shape (E, N, K / 32, 16), and "
            f"that of its scales be (E, N, K / 32); got {shape}, {checkpoint.shape(exponents)}"
        )
    tensors = ModuleTensors(checkpoint, name.rpartition(".")[0])
    kind = blocks.rpartition(".")[2]
    begin, end = check_columns(tensors, kind, columns, shape[2] * _BLOCK, _BLOCK)
    start, stop, step = rows.indices(shape[0] * shape[1])
    part = slice(begin // _BLOCK, end // _BLOCK)
    packed = checkpoint.read_bytes(blocks, start, stop)[::step, part]
    scales = np.ascontiguousarray(checkpoint.read_bytes(exponents, start, stop)[::step, part])
    codes = unpack_nibbles(packed.reshape(len(packed), -1))
    found = QuantizedRows(FORMATS["mxfp4"], codes, scales)
    return check_scales(tensors, exponents.rpartition(".")[2], found)


def dequantize_mxfp4(blocks: Array, scales: Array) -> Array:
    """Return the numbers (R, 32 B) float32 of blocks (R, B, 16) and scales (R, B), both uint8.

    A byte's two numbers are neighbours; the low nibble comes first.

    Examples
    --------
    >>> blocks = np.zeros((1, 1, 16), np.uint8)
    >>> blocks[0, 0, :2] = 0x21, 0x0F
    >>> dequantize_mxfp4(blocks, np.array([[128]], np.uint8))[0, :4]
    array([  1.,   2., -12.,   0.], dtype=float32)
    """
    values: Array = _PAIRS[blocks].view(np.float32)  # (R, B, 32)
    with np.errstate(over="ignore"):
        values *= E8M0[scales][:, :, None]
    return values.reshape(len(blocks), -1)
