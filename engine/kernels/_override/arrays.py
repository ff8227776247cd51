"""Arrays that go into an override and come out of it; copies that a launch plan records."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from engine import device
from engine.kernels import _memory
from engine.kernels._launch_plan import plan_call

__all__ = ["contiguous", "copy_into", "in_rows", "is_same", "overlaps"]


def overlaps(array: Any, others: Any) -> bool:
    """Tell whether an array may share memory with one of `others`, nested or not."""
    return any(_memory.overlaps(array, other) for other in _arrays(others))


def is_same(a: Any, b: Any) -> bool:
    """Tell whether `b` is an array, and the same memory as `a` in the same layout."""
    return _is_array(b) and _memory.is_same(a, b)


def copy_into(target: Any, source: Any) -> Any:
    """Copy `source` to `target` of the same shape and dtype, which is returned."""
    if isinstance(target, np.ndarray):
        np.copyto(target, source)
    elif not is_same(target, source):
        plan_call(_Copy(target, source), target, source)
    return target


def contiguous(array: Any) -> Any:
    """Return `array`, or a copy if it is a view that is not C-contiguous."""
    if array is None or array.flags.c_contiguous:
        return array
    return copy_into(device.empty_like(array), array)


def in_rows(array: Any) -> Any:
    """Return `array` (..., N) as C-contiguous rows (R, N), copied if it is a view with gaps."""
    shape = (math.prod(array.shape[:-1]), array.shape[-1])
    array = contiguous(array)
    return array if array.shape == shape else array.reshape(shape)


class _Copy:
    """Copies between arrays of these layouts, given by address: a launch plan repeats it."""

    __name__ = "copy"

    def __init__(self, target: Any, source: Any) -> None:
        self._device = target.device.id
        self._layouts = [(a.shape, a.dtype, a.strides) for a in (target, source)]

    def __call__(self, *addresses: int) -> None:
        pairs = zip(addresses, self._layouts, strict=True)
        target, source = (self._array(address, *layout) for address, layout in pairs)
        target[...] = source

    def _array(self, address: int, shape: Any, dtype: Any, strides: Any) -> Any:
        """Return a CuPy array over memory that the plan keeps alive."""
        cupy = device.cupy()
        size = _extent(shape, dtype, strides)
        memory = cupy.cuda.UnownedMemory(address, size, self, self._device)
        return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0), strides)


def _arrays(value: Any) -> Iterator[Any]:
    if _is_array(value):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _arrays(item)
    elif isinstance(value, dict):
        yield from _arrays(list(value.values()))


def _is_array(value: Any) -> bool:
    """Tell an array from all else; NumPy's scalars and their classes have `strides`, too."""
    has_strides = hasattr(value, "strides") and hasattr(value, "dtype")
    return has_strides and not isinstance(value, type | np.generic)


def _extent(shape: Any, dtype: Any, strides: Any) -> int:
    if 0 in shape:
        return 0
    return int(dtype.itemsize + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)))
