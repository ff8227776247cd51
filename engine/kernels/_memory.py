"""Where arrays lie in memory: address, overlap; for NumPy arrays, CuPy arrays and PlanArrays."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

__all__ = ["address", "is_same", "overlaps", "repeats_elements"]

_MAX_WORK: Any = 1000  # candidate solutions that `overlaps` tries; NumPy's stubs allow 0 and -1


def address(array: Any) -> int:
    """Return the address of the first element."""
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)


def overlaps(a: Any, b: Any) -> bool:
    """Tell whether elements of two arrays share memory; also True if that takes long to tell."""
    start, stop = _span(a)
    other_start, other_stop = _span(b)
    if max(start, other_start) >= min(stop, other_stop):
        return False
    return np.may_share_memory(_on_host(a), _on_host(b), max_work=_MAX_WORK)


def is_same(a: Any, b: Any) -> bool:
    """Tell whether two arrays are the same memory in the same layout."""
    return address(a) == address(b) and a.shape == b.shape and a.strides == b.strides


def repeats_elements(array: Any) -> bool:
    """Tell whether elements of an array share memory, as those of a broadcast view do.

    Also True if the span of one axis reaches into that of another, whatever lies there.
    """
    if array.flags.c_contiguous or not array.size:
        return False
    stop = array.itemsize
    pairs = zip(array.shape, array.strides, strict=True)
    for stride, n in sorted((abs(stride), n) for n, stride in pairs if n > 1):
        if stride < stop:
            return True
        stop += (n - 1) * stride
    return False


def _on_host(array: Any) -> Any:
    """Return a NumPy array of the same address and layout, whose elements must not be read."""
    if isinstance(array, np.ndarray):
        return array
    layout: dict[str, Any] = {"shape": tuple(array.shape), "strides": tuple(array.strides)}
    layout |= {"data": (address(array), False), "typestr": f"|V{array.itemsize}", "version": 3}
    return np.asarray(SimpleNamespace(__array_interface__=layout))


def _span(array: Any) -> tuple[int, int]:
    start = address(array)
    if array.flags.c_contiguous:
        return start, start + array.nbytes
    steps = [(n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True)]
    low = start + sum(step for step in steps if step < 0)
    return low, start + sum(step for step in steps if step > 0) + array.itemsize
