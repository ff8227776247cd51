"""A Hopper GPU that is not there: CuPy and the driver, as far as recording launches needs them.

Arrays lie at made-up addresses, and kernels are neither compiled nor launched. `install` affects
the whole process and cannot be undone: call it in a process of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import sys
from types import ModuleType, SimpleNamespace

import numpy as np

_REGION = 1 << 40  # bytes between allocations of the pool
_FIRST_REGION = 5000  # beyond those of a prepared call


class _Memory:
    def __init__(self, pointer, size, owner, device):
        self.ptr = pointer


class _Pointer:
    def __init__(self, memory, offset):
        self.ptr = memory.ptr + offset


class _Array:
    """An ndarray of CuPy; NumPy computes its views, and nothing reads its memory."""

    device = SimpleNamespace(id=0)

    def __init__(self, shape, dtype, pointer, strides=None):
        memory = (ctypes.c_char * (_REGION >> 1)).from_address(pointer.ptr)
        self._view = np.ndarray(shape, dtype, memory, 0, strides)

    @classmethod
    def _of(cls, view):
        array = cls.__new__(cls)
        array._view = view
        return array

    @property
    def data(self):
        return SimpleNamespace(ptr=self._view.__array_interface__["data"][0])

    def __len__(self):
        return len(self._view)

    def __getitem__(self, index):
        return self._of(self._view[index])

    def reshape(self, *shape):
        return self._of(self._view.reshape(*shape))

    def view(self, dtype):
        return self._of(self._view.view(dtype))

    def set(self, values, stream=None):
        assert values.shape == self.shape and values.dtype == self.dtype


for _name in ("shape", "dtype", "strides", "size", "ndim", "itemsize", "nbytes", "flags"):
    setattr(_Array, _name, property(lambda self, name=_name: getattr(self._view, name)))


class _Allocators:
    def __init__(self):
        self._numbers = itertools.count(_FIRST_REGION)
        self._current = [self.pool]

    def pool(self, size):
        return _Pointer(_Memory(next(self._numbers) * _REGION, size, None, 0), 0)

    @contextlib.contextmanager
    def using(self, allocate=None):  # None: CuPy's, which asks the driver
        self._current.append(allocate or self.pool)
        try:
            yield
        finally:
            self._current.pop()

    def empty(self, shape, dtype=np.float32):
        shape = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return _Array(shape, dtype, self._current[-1](size))


class _Stream(contextlib.nullcontext):
    ptr = 0

    def __init__(self, non_blocking=False):
        super().__init__()

    def synchronize(self):
        pass


class _Driver:
    """Any function of the driver: it succeeds."""

    def __getattr__(self, name):
        return lambda *_: 0


def _cupy():
    allocators = _Allocators()
    cupy = ModuleType("cupy")
    cupy.ndarray = _Array
    cupy.empty = allocators.empty
    cupy.get_default_memory_pool = lambda: SimpleNamespace(malloc=allocators.pool)
    limits = {"MaxSharedMemoryPerBlockOptin": 227 * 1024, "MultiProcessorCount": 132}
    cupy.cuda = SimpleNamespace(
        Device=lambda index=0: SimpleNamespace(id=index, attributes=limits),
        MemoryPointer=_Pointer,
        Stream=_Stream,
        UnownedMemory=_Memory,
        driver=SimpleNamespace(occupancyMaxActiveBlocksPerMultiprocessor=lambda *_: 2),
        get_current_stream=_Stream,
        runtime=SimpleNamespace(
            getDevice=lambda: 0, getDeviceProperties=lambda index: {"major": 9, "minor": 0}
        ),
        using_allocator=allocators.using,
    )
    return cupy


def install():
    """Replace CuPy, the driver and the compiler in this process."""
    sys.modules["cupy"] = _cupy()

    from engine.kernels import _chip, _launch, _prepared_call, _tensor_map

    function = SimpleNamespace(
        kernel=SimpleNamespace(ptr=1), shared_size_bytes=0, max_dynamic_shared_size_bytes=0
    )
    module = SimpleNamespace(get_function=lambda entry: function)
    _launch.load_module = lambda spec: module
    _chip.current_architecture = lambda index=0: "sm_90a"
    _prepared_call._driver = _Driver
    _tensor_map._driver = lambda: lambda *_: 0
