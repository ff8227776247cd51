"""Kernel parameters in one C struct, passed by value.

A kernel with many parameters takes them as `const __grid_constant__ Params p`. The equivalent NumPy
struct is laid out here from the kernel's parameter list, by C's rules: each field at the next
multiple of its alignment, the size a multiple of the largest alignment.
`tests/kernels/test_params.py` compares each one with the CUDA struct.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

__all__ = ["TENSOR_MAP_BYTES", "ParamStruct", "struct_dtype"]

TENSOR_MAP_BYTES = 128

# Parameter type -> NumPy type, code of the `struct` module, alignment in bytes.
_FIELDS: dict[str, tuple[Any, str, int]] = {
    "ptr": (np.uint64, "Q", 8),
    "i32": (np.int32, "i", 4),
    "i64": (np.int64, "q", 8),
    "u32": (np.uint32, "I", 4),
    "u64": (np.uint64, "Q", 8),
    "f32": (np.float32, "f", 4),
    "f64": (np.float64, "d", 8),
    "tmap": (np.dtype((np.void, TENSOR_MAP_BYTES)), f"{TENSOR_MAP_BYTES}s", 64),
}


class ParamStruct:
    """A kernel's parameters as one struct.

    Parameters
    ----------
    name : str
        The struct's name in CUDA.
    names, types : sequence of str
        Its fields, in order.

    Attributes
    ----------
    dtype : np.dtype
        Fields, offsets and size.

    Examples
    --------
    >>> params = ParamStruct("Params", ["n", "x"], ["i32", "ptr"])
    >>> memory = params.pack((7, None))
    >>> params.field(memory, 0), params.field(memory, 1)[()]
    (array(7, dtype=int32), np.uint64(0))
    """

    def __init__(self, name: str, names: Sequence[str], types: Sequence[str]) -> None:
        self.name = name
        self.dtype = struct_dtype(names, types)
        self._offsets = _offsets(types)
        self._dtypes = [np.dtype(_FIELDS[kind][0]) for kind in types]
        self._packer = struct.Struct(self._format(types))
        self._converters = [(i, _CONVERTERS[t]) for i, t in enumerate(types) if t in _CONVERTERS]

    def pack(self, values: Sequence[Any]) -> bytearray:
        """Return the struct's bytes.

        Parameters
        ----------
        values : sequence
            Numbers, arrays (or None) for pointers, and tensor maps, in the order of the fields.

        Raises
        ------
        OverflowError
            If a number does not fit its C type.
        """
        ready = list(values)
        for index, convert in self._converters:
            ready[index] = convert(ready[index])
        try:
            return bytearray(self._packer.pack(*ready))
        except (struct.error, OverflowError) as error:
            fields = dict(zip(self.dtype.names or (), values, strict=True))
            numbers = {n: v for n, v in fields.items() if isinstance(v, int | float | np.generic)}
            raise OverflowError(f"{self.name}: {error}; got {numbers}") from None

    def field(self, memory: bytearray, index: int) -> np.ndarray[Any, Any]:
        """Return a writable view of one field of a packed struct."""
        view: np.ndarray[Any, Any] = np.ndarray(
            (), self._dtypes[index], memory, self._offsets[index]
        )
        return view

    def _format(self, types: Sequence[str]) -> str:
        parts = ["<"]
        end = 0
        for kind, offset in zip(types, self._offsets, strict=True):
            parts.append(f"{offset - end}x{_FIELDS[kind][1]}")
            end = offset + np.dtype(_FIELDS[kind][0]).itemsize
        return "".join(parts) + f"{self.dtype.itemsize - end}x"


_CONVERTERS: dict[str, Callable[[Any], Any]] = {
    "ptr": lambda value: 0 if value is None else int(value.data.ptr),
    "tmap": lambda value: value.tobytes(),
}


def _offsets(types: Sequence[str]) -> list[int]:
    """Return the byte offsets of a C struct's fields of these types."""
    offsets = []
    end = 0
    for kind in types:
        dtype, _, alignment = _FIELDS[kind]
        offsets.append(-(-end // alignment) * alignment)
        end = offsets[-1] + np.dtype(dtype).itemsize
    return offsets


def struct_dtype(names: Sequence[str], types: Sequence[str]) -> np.dtype[Any]:
    """Return the NumPy struct with these fields.

    Examples
    --------
    >>> struct = struct_dtype(["n", "x", "eps"], ["i32", "ptr", "f32"])
    >>> [struct.fields[name][1] for name in struct.names], struct.itemsize
    ([0, 8, 16], 24)
    """
    offsets = _offsets(types)
    formats = [_FIELDS[kind][0] for kind in types]
    largest = max(_FIELDS[kind][2] for kind in types)
    end = offsets[-1] + np.dtype(formats[-1]).itemsize
    return np.dtype(
        {
            "names": list(names),
            "formats": formats,
            "offsets": offsets,
            "itemsize": -(-end // largest) * largest,
        }
    )
