"""Named slabs of memory under one limit, allocated with `cupy.cuda.MemoryPool` or NumPy.

The engine allocates a few large arrays once (weights, pages, workspaces) and nothing in the decode
loop, so a pool is a ledger of named slabs rather than an allocator. `device_memory` returns the
device's total and free memory; `MemoryPool` allocates slabs and records their sizes.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.cache.host_memory import host_memory
from engine.device import CPU, Device
from engine.errors import ContractError, OutOfMemoryError

__all__ = ["MemoryPool", "PoolStats", "device_memory", "format_bytes"]


@dataclass(frozen=True)
class PoolStats:
    """A snapshot of a pool, in bytes; `slabs` maps each name to its size."""

    limit: int
    used: int
    peak: int
    slabs: dict[str, int]


class MemoryPool:
    """Slabs by name, on one device, together no larger than `limit`.

    Parameters
    ----------
    device : Device
        Device of the slabs: NumPy arrays on the CPU, CuPy arrays on CUDA.
    limit : int, optional
        Maximum total bytes; by default all of the device's memory.

    Examples
    --------
    >>> pool = MemoryPool(CPU, limit=1 << 20)
    >>> pages = pool.allocate("kv", (4, 16), np.float32)
    >>> pool.stats().slabs
    {'kv': 256}
    >>> pool.free("kv")
    >>> pool.stats().used, pool.stats().peak
    (0, 256)
    """

    def __init__(self, device: Device = CPU, limit: int | None = None) -> None:
        total, _ = device_memory(device)
        self.device = device
        self.limit = total if limit is None else limit
        if self.limit < 1:
            raise ContractError(f"limit must be at least 1 byte; got {limit}")
        self._slabs: dict[str, Any] = {}
        self._peak = 0
        self._cuda_pool = device.xp.cuda.MemoryPool() if device.is_cuda else None

    def allocate(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        """Return a new zero-filled array on the device, recorded as `name`.

        Raises
        ------
        ContractError
            If `name` is taken or a size is negative.
        OutOfMemoryError
            If the limit or the device's memory is exceeded; the message lists the slabs.
        """
        if name in self._slabs or any(size < 0 for size in shape):
            raise ContractError(f"slab {name!r} must be new and of sizes >= 0; got shape {shape}")
        num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        if num_bytes > self.limit - self.used:
            raise self._out_of_memory(name, num_bytes, "the pool's limit is reached")
        array = self._zeros(name, num_bytes, shape, dtype)
        self._slabs[name] = array
        self._peak = max(self._peak, self.used)
        return array

    def free(self, name: str) -> None:
        """Drop slab `name`; its memory returns to the device once its last view is gone."""
        if name not in self._slabs:
            raise ContractError(f"name must be one of {sorted(self._slabs)}; got {name!r}")
        del self._slabs[name]

    @property
    def used(self) -> int:
        """Bytes of all slabs."""
        return sum(int(slab.nbytes) for slab in self._slabs.values())

    def stats(self) -> PoolStats:
        """Return limit, use and peak in bytes, and the size of each slab."""
        sizes = {name: int(slab.nbytes) for name, slab in self._slabs.items()}
        return PoolStats(self.limit, sum(sizes.values()), self._peak, sizes)

    def _zeros(
        self, name: str, num_bytes: int, shape: tuple[int, ...], dtype: npt.DTypeLike
    ) -> Any:
        if self._cuda_pool is None:
            try:
                return np.zeros(shape, dtype)
            except MemoryError as error:
                raise self._out_of_memory(name, num_bytes, "the system refused it") from error
        cp = self.device.xp
        with cp.cuda.Device(self.device.index):
            try:
                pointer = self._cuda_pool.malloc(num_bytes)
            except cp.cuda.memory.OutOfMemoryError as error:
                raise self._out_of_memory(name, num_bytes, "the device is full") from error
            owner = _SlabMemory(self._cuda_pool, pointer, self.device)
            memory = cp.cuda.UnownedMemory(pointer.ptr, num_bytes, owner, self.device.index)
            array = cp.ndarray(shape, dtype, memptr=cp.cuda.MemoryPointer(memory, 0))
            array.fill(0)
            return array

    def _out_of_memory(self, name: str, num_bytes: int, why: str) -> OutOfMemoryError:
        total, free = device_memory(self.device)
        held = ", ".join(f"{n} {format_bytes(s)}" for n, s in self.stats().slabs.items())
        return OutOfMemoryError(
            f"slab {name!r} needs {format_bytes(num_bytes)} on {self.device}, but {why}: "
            f"limit {format_bytes(self.limit)}, slabs: {held or 'none'}; the device has "
            f"{format_bytes(total)}, of which {format_bytes(free)} are free"
        )


class _SlabMemory:
    """Memory of a CuPy pool that returns to the device with the last array over it.

    A CuPy pool keeps what is freed, and loses it when the pool itself ends.
    """

    def __init__(self, pool: Any, pointer: Any, device: Device) -> None:
        self._pool = pool
        self._pointer = pointer
        self._device = device

    def __del__(self) -> None:
        if not sys.is_finalizing():
            del self._pointer
            with self._device.xp.cuda.Device(self._device.index):
                self._pool.free_all_blocks()


def device_memory(device: Device) -> tuple[int, int]:
    """Return (total, free) bytes of the device; on the CPU, the result of `host_memory`."""
    if device.is_cuda:
        cp = device.xp
        with cp.cuda.Device(device.index):
            free, total = cp.cuda.runtime.memGetInfo()
        return int(total), int(free)
    return host_memory()


def format_bytes(num_bytes: float) -> str:
    """Format a number of bytes in binary units.

    Examples
    --------
    >>> format_bytes(512), format_bytes(3 << 20), format_bytes(-1.5 * 2**30)
    ('512 B', '3.00 MiB', '-1.50 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.2f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} TiB"
