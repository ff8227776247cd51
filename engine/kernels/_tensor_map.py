"""Descriptions of matrices for Hopper's copy engine (TMA), encoded by the driver, kept by key."""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache
from typing import Any

import numpy as np

from engine.errors import DeviceError

__all__ = ["map_source", "tensor_map", "tensor_map_2d", "tensor_map_of"]

_BYTES = 128
_ALIGNMENT = 64  # of the map's own address

_DTYPES = {"uint8": (0, 1), "float16": (6, 2), "bfloat16": (9, 2)}  # CUtensorMapDataType, bytes
_SWIZZLES = {64: 2, 128: 3}  # CUtensorMapSwizzle
_L2_PROMOTIONS = {0: 0, 64: 1, 128: 2, 256: 3}  # bytes to CUtensorMapL2promotion

_sources: dict[int, tuple[Any, ...]] = {}  # where a map lies: what it was made of


def tensor_map_2d(array: Any, dtype: str, box: tuple[int, int]) -> Any:
    """Return the 128-byte map of a matrix, to be passed to a kernel by value.

    Parameters
    ----------
    array : (R, C) CuPy array, 16-bit
        Columns contiguous; address and row stride multiples of 16 bytes.
    dtype : "float16" or "bfloat16"
    box : (rows, columns)
        What one copy moves; columns * 2 bytes at most 128. Copies use the 128-byte swizzle, and
        what lies outside the matrix arrives as zeros. L2 fetches 128 bytes at a time: with 256
        products of few rows took 3 % longer.

    Raises
    ------
    DeviceError
        If the driver refuses.
    """
    rows, columns = array.shape
    sizes, strides = (columns, rows), (array.strides[0],)
    return tensor_map(array.data.ptr, dtype, sizes, strides, box[::-1], promote=128)


def tensor_map(
    pointer: int,
    dtype: str,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    *,
    promote: int = 256,
    swizzle: int = 128,
) -> Any:
    """Return the map of an array of up to 5 axes, the contiguous one first.

    Parameters
    ----------
    pointer : int
        Address, a multiple of 16.
    dtype : "uint8", "float16" or "bfloat16"
    sizes : tuple of int
    strides : tuple of int
        In bytes, of all axes but the first: multiples of 16 (that of an axis of 1 says nothing).
    box : tuple of int
        What one copy moves along each axis, as in `tensor_map_2d`.
    promote : 0, 64, 128 or 256
        Bytes that L2 fetches for whatever is asked for; 0: no more than that.
    swizzle : 64 or 128
        Bytes of the span in which copies swap 16-byte words: at least those of the box's rows.
    """
    row = -(-sizes[0] * _DTYPES[dtype][1] // 16) * 16
    known = (row if n == 1 else step for n, step in zip(sizes[1:], strides, strict=True))
    return _encode(pointer, dtype, sizes, tuple(known), box, promote, swizzle)


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled


@lru_cache(maxsize=1 << 14)
def _encode(
    pointer: int,
    dtype: str,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    promote: int,
    swizzle: int,
) -> Any:
    """The map holds no memory: a stale one only describes where an array once was."""
    buffer = np.zeros(_BYTES + _ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT
    encoded = buffer[start : start + _BYTES]
    rank = len(sizes)
    status = _driver()(
        ctypes.c_void_p(encoded.ctypes.data),
        ctypes.c_int(_DTYPES[dtype][0]),
        ctypes.c_uint32(rank),
        ctypes.c_void_p(pointer),
        (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * (rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        ctypes.c_int(0),  # not interleaved
        ctypes.c_int(_SWIZZLES[swizzle]),
        ctypes.c_int(_L2_PROMOTIONS[promote]),
        ctypes.c_int(0),  # zeros outside
    )
    if status != 0:
        raise DeviceError(
            f"cuTensorMapEncodeTiled failed with status {status} for {dtype} {sizes}, "
            f"{strides} bytes apart, box {box}, at {pointer:#x}"
        )
    _sources[encoded.ctypes.data] = (pointer, dtype, sizes, strides, box, promote, swizzle)
    return encoded.view(np.dtype((np.void, _BYTES)))


def map_source(encoded: Any) -> tuple[Any, ...]:
    """Return what `tensor_map_of` made this map of: the address, and the rest."""
    return _sources[encoded.ctypes.data]


def tensor_map_of(pointer: int, *rest: Any) -> Any:
    """Return the map that `map_source` describes, of the same array elsewhere."""
    return _encode(pointer, *rest)
