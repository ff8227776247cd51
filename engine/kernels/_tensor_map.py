"""Tensor maps: TMA descriptors of arrays, encoded by the driver and cached."""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache
from typing import Any

import numpy as np

from engine.errors import DeviceError

__all__ = ["box_error", "map_source", "tensor_map", "tensor_map_2d", "tensor_map_of"]

_BYTES = 128
_ALIGNMENT = 64  # bytes; CUDA requires it for the map itself

# CUtensorMapDataType and itemsize.
_DTYPES = {
    "uint8": (0, 1),
    "int32": (3, 4),
    "float16": (6, 2),
    "float32": (7, 4),
    "bfloat16": (9, 2),
}
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}  # bytes to CUtensorMapSwizzle
_L2_PROMOTIONS = {0: 0, 64: 1, 128: 2, 256: 3}  # bytes to CUtensorMapL2promotion

_sources: dict[int, tuple[Any, ...]] = {}  # address of a map -> arguments of _encode


def tensor_map_2d(array: Any, dtype: str, box: tuple[int, int]) -> Any:
    """Return the tensor map (128 bytes) of a matrix, to be passed to a kernel by value.

    Parameters
    ----------
    array : (R, C) CuPy array, 16-bit
        Columns contiguous; address and row stride multiples of 16 bytes.
    dtype : "float16" or "bfloat16"
    box : (rows, columns)
        TMA box; its columns span at most 128 bytes. Copies use the 128-byte swizzle, and elements
        outside the matrix are loaded as zeros. L2 promotion is 128 bytes: 256 makes skinny GEMMs
        3 % slower.

    Raises
    ------
    DeviceError
        If the driver rejects the map.
    """
    rows, columns = array.shape
    sizes = (columns, rows)
    strides = (array.strides[0],)
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
    """Return the tensor map of an array of up to 5 axes, the contiguous one first.

    Parameters
    ----------
    pointer : int
        Address, a multiple of 16.
    dtype : "uint8", "int32", "float16", "float32" or "bfloat16"
    sizes : tuple of int
    strides : tuple of int
        Strides in bytes of all axes but the first: multiples of 16 (ignored for axes of size 1).
    box : tuple of int
        TMA box: elements along each axis. See `tensor_map_2d`.
    promote : 0, 64, 128 or 256
        L2 promotion: bytes that L2 fetches at a time; 0 for none.
    swizzle : 0, 32, 64 or 128
        Span of the swizzle in bytes, at least one row of the box; 0 for none.
    """
    row = -(-sizes[0] * _DTYPES[dtype][1] // 16) * 16
    known = (row if n == 1 else step for n, step in zip(sizes[1:], strides, strict=True))
    return _encode(pointer, dtype, sizes, tuple(known), box, promote, swizzle)


def box_error(dtype: str, box: tuple[int, ...], swizzle: int, promote: int = 128) -> str:
    """Return why no array of this dtype has a tensor map with this box; "" if one may.

    Parameters
    ----------
    dtype : str
        See `tensor_map`.
    box : tuple of int
        Elements along each axis, the contiguous one last.
    swizzle : 0, 32, 64 or 128
    promote : 0, 64, 128 or 256
        See `tensor_map`.

    Examples
    --------
    >>> box_error("float32", (34, 34), 0)
    'a row of the box has 34 elements, 136 bytes: it must be a multiple of 16 bytes'
    """
    if dtype not in _DTYPES:
        return f"its dtype must be one of {', '.join(_DTYPES)}; it is {dtype}"
    if not 2 <= len(box) <= 5 or not all(_is_box_size(n) for n in box):
        return f"a box must have 2 to 5 axes of 1 to 256 elements; it is {box}"
    if swizzle not in _SWIZZLES:
        return f"its swizzle must be one of {', '.join(map(str, _SWIZZLES))}; it is {swizzle}"
    if promote not in _L2_PROMOTIONS:
        known = ", ".join(map(str, _L2_PROMOTIONS))
        return f"its l2_promotion must be one of {known}; it is {promote}"
    num_bytes = box[-1] * _DTYPES[dtype][1]
    row = f"a row of the box has {box[-1]} elements, {num_bytes} bytes"
    if num_bytes % 16:
        return f"{row}: it must be a multiple of 16 bytes"
    if swizzle and num_bytes > swizzle:
        return f"{row}: it must be at most {swizzle}, the swizzle (swizzle=0 for none)"
    return ""


def _is_box_size(size: object) -> bool:
    return isinstance(size, int) and 1 <= size <= 256


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
    """Encode a map. It holds an address but owns no memory, so a stale cached map is harmless."""
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
        ctypes.c_int(0),  # no interleave
        ctypes.c_int(_SWIZZLES[swizzle]),
        ctypes.c_int(_L2_PROMOTIONS[promote]),
        ctypes.c_int(0),  # zeros outside the array
    )
    if status != 0:
        why = box_error(dtype, box[::-1], swizzle, promote)
        raise DeviceError(
            f"the driver refuses a tensor map{f': {why}' if why else ''} (CUDA error {status}; "
            f"{dtype}, the contiguous axis first: sizes {sizes}, {strides} bytes apart, box {box}, "
            f"at {pointer:#x})"
        )
    _sources[encoded.ctypes.data] = (pointer, dtype, sizes, strides, box, promote, swizzle)
    return encoded.view(np.dtype((np.void, _BYTES)))


def map_source(encoded: Any) -> tuple[Any, ...]:
    """Return the arguments of `tensor_map_of` for this map: the address, then the rest."""
    return _sources[encoded.ctypes.data]


def tensor_map_of(pointer: int, *rest: Any) -> Any:
    """Return the tensor map for the arguments of `map_source`, possibly at another address."""
    return _encode(pointer, *rest)
